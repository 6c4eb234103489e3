"""What rows of `fit` rest on, and what it has no rows for.

takes: a question; a model, a device, options. returns: the notes of an answer; which options do not
go with several processes. Raises InvalidInput, with what to ask instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from rockplan.errors import InvalidInput
from rockplan.fitting.as_on_cuda import autocast_dtype
from rockplan.fitting.gpus import Gpu, others_bytes
from rockplan.fitting.rates import OF_PRODUCTS
from rockplan.fitting.shards import Shards
from rockplan.fitting.training_step import TrainingStep
from rockplan.options import FSDP2, Options, without_effect
from rockplan.search.paging import SHARE
from rockplan.values.plan import format_bytes
from rockplan.will_it_fit.question import FitQuestion

OF_GPU = (
    "memory: PyTorch's operators, with CUDA's kernels of dropout and attention, {autocast}; as "
    "measured on CPU, parameters, gradients, optimizer and plans to the byte, kept whole within "
    "0.1 %, checkpointing within 2 %. by a table: context, cuBLAS's workspaces (those inside of "
    "other operators are not in the sum). by a model: reserved, of PyTorch's caching allocator "
    "without expandable_segments. {memory}"
)
OF_RATES = (
    "a second: products at best at {tflops.float16:.0f} Tflop/s in 16 bits and "
    "{tflops.float32:.0f} in 32, memory at {bandwidth:g} GB/s, of which steps reach {share:.0%}; "
    "from a host that takes {host[1]:g} us for the call of an operator to one that takes "
    "{host[0]:g}. {rates}"
)
NO_RATES = (
    "a second is left out, since nobody has published what products on this device reach; "
    "overheads are of usual rates"
)
# By benchmarks/results/fit_published.md.
MEMORY_SEEN = (
    "all of 20 sizes that were measured on GPUs are within 5 %, by the operators of their PyTorch, "
    "and 7 of 8 largest batches agree"
)
RATES_SEEN = (
    "of 21 measured steps 20 are within 20 % of what is said, or of its range, the other is 21 % "
    "slower"
)

ONE_BATCH = "one batch was asked for, {}: sizes={{0: (1, 1024)}} (--batch 1:1024) finds the largest"

IN_EVALUATION = (
    "the model is in evaluation mode, in which dropout is nothing and statistics stay: call "
    "train() first for training as it usually is"
)

ON_CPU = (
    "of the CPU of this machine: parameters, gradients, optimizer and plans to the byte, with what "
    "operators take while they run, as tried at the captured sizes. by a table: context, for "
    "Python and its libraries",
    "times are estimates by bytes and operations: overheads are ratios of them",
)
EAGER = "eager PyTorch, as measured: kept whole within 0.1 %, checkpointing within 2 %"
COMPILED = (
    "kernels are those that were compiled here: kept whole is the compiled program, nothing of it "
    "run again. no row for checkpointing, in which torch.compile chooses itself what to keep"
)
OF_SEVERAL = (
    "of a rank: batches are its own; what is gathered and buckets: as measured on CPU with gloo. "
    "not in the sum: what the library of the exchange (NCCL) takes beside them; not in the times: "
    "the exchange"
)


def notes_of(question: FitQuestion, batches: tuple[int, int]) -> tuple[str, ...]:
    """Return sentences for the end of an answer that say what its figures rest on. batches: the
    least and the most that were asked for."""
    notes = [] if any(m.training for m in question.given.modules()) else [IN_EVALUATION]
    notes += ON_CPU if question.on.is_cpu else _of_gpu(question.on)
    if question.options.compile:
        notes.append(COMPILED)
    elif question.on.is_cpu:
        notes.append(EAGER)
    if question.host:
        rate = format_bytes(question.host.link.out_bytes_per_s)
        notes.append(f"paging: over a link of {rate}/s each way, planned for {SHARE:.0%} of it")
    if question.shards.count > 1:
        notes.append(OF_SEVERAL)
    for batch, length in sorted(question.untried, key=str):
        of_length = "" if length is None else f" of length {length}"
        notes.append(
            f"batches from {batch} on{of_length} may fit, too: they count as too large, since an "
            "operation of them takes more than half of the memory that is left here to try it in"
        )
    least, most = batches
    if least == most:
        notes.append(ONE_BATCH.format(most))
    return tuple(notes)


def note_of_others(on: Gpu) -> tuple[str, ...]:
    """Return a sentence about memory of the device that other processes have now; none if it is not
    of this machine, or they have none."""
    if on.is_cpu or not on.at_hand or not (taken_bytes := others_bytes(on.at_hand)):
        return ()
    left_bytes = on.memory_bytes - taken_bytes
    return (
        f"rows are of the whole device: others hold {format_bytes(taken_bytes)} of {on.at_hand} "
        f"now; '{left_bytes >> 20}MiB' as the device asks what fits beside them",
    )


def _of_gpu(on: Gpu) -> Iterator[str]:
    dtype = autocast_dtype()
    autocast = (
        f"under autocast of {str(dtype).removeprefix('torch.')}, by CUDA's lists"
        if dtype
        else "without autocast"
    )
    yield OF_GPU.format(autocast=autocast, memory=MEMORY_SEEN)
    if on.tflops is None:
        yield NO_RATES
        return
    facts = {"tflops": on.tflops, "bandwidth": on.bandwidth_gb_s, "host": on.host_us}
    yield OF_RATES.format(**facts, share=OF_PRODUCTS, rates=RATES_SEEN)


def refuse_elsewhere(model: nn.Module, on: Gpu, options: Options) -> None:
    """Raise InvalidInput if kernels are to be compiled, or operators tried, on another device than
    the model is captured on."""
    own = {t.device.type for t in (*model.parameters(), *model.buffers())} or {"cpu"}
    if options.compile and not on.at_hand:
        here = min(own)
        raise InvalidInput(
            f"which kernels the compiler makes is known on the device that they are made for, and "
            f"{on} is given by its name or bytes: ask for the device that the model is on, device="
            f"torch.device('{here}') (--gpu {here}), or leave compile out"
        )
    if (options.compile or on.is_cpu) and own != {on.at_hand.partition(":")[0]}:
        raise InvalidInput(
            f"operators run on {on.at_hand} to see what they take, and the model is on "
            f"{', '.join(sorted(own))} (one on the meta device counts as on the CPU): move model "
            f"and sample with .to('{on.at_hand}')"
        )


def not_for_several(shards: Shards, step: TrainingStep, options: Options) -> dict[str, str]:
    """Return option -> why it cannot be had with these processes, of the options and facts of the
    step that are on."""
    whys: dict[str, str] = {}
    if shards.count > 1 and step.in_backward:
        whys["in_backward"] = (
            "is for one process: gradients of several are there when they are reduced"
        )
    if shards.are_parts and step.average:
        whys["average"] = (
            "is AveragedModel, which copies the model, and what fully_shard made cannot be copied: "
            "leave it out, or say shard='ddp'"
        )
    return whys | without_effect(options, FSDP2) if shards.are_parts else whys
