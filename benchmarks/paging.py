"""Paging to the host and recomputation, planned together, beside recomputation alone and blind
offload, at prices of an H200.

    OMP_NUM_THREADS=1 python -m benchmarks.paging [--models llama8 mistral8 gpt2-large]
        [--links 0 12 25 55 200]      GB/s; 0: without a host
        [--blocks]                    only blocks of a Llama, planned one by one and run here

Nothing runs: models are on the meta device, and compiled kernels are priced by a roofline whose
two rates reproduce the two steps of llama8 that were measured on an H200, 62 ms as eager runs it
and 45 ms of compiled kernels with everything kept. So these are predictions. For each model,
budgets and links: plans without a host, and with one, which are made for 0.8 of the link
(`planned`) and priced at all of it (`at the link`); `bound` is what their certificate proves of all
plans for 0.8 of it. Beside them `torch.utils.checkpoint` of each
layer, the same with the inputs of layers paged, and everything that is saved paged, where each copy
is waited for (as by `torch.autograd.graph.save_on_cpu`), each at its own peak.
Writes benchmarks/results/paging.{jsonl,md}.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import nn

from benchmarks.timing import where
from rockplan import blocks_of, peak_live_bytes, restore_blocks, solve_blocks
from rockplan.budget import Budget
from rockplan.errors import InfeasibleBudget
from rockplan.fitting.ways import per_block
from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.costs.estimate import Rates, roofline
from rockplan.graph_builder.pipeline import lower
from rockplan.options import Options
from rockplan.oracles.simulate import simulate
from rockplan.runtime import checkpointing
from rockplan.search.local.placing import placed
from rockplan.search.paging import LEAST_BYTES
from rockplan.search.planning import plan_anew
from rockplan.search.problem import Problem, problem_of
from rockplan.values.copies import HostLink, with_copies, with_fetches
from rockplan.values.graph import CDGraph, DataKind
from rockplan.values.schedule import Schedule, keep_all, kept_data
from rockplan.will_it_fit.twin import twin_of, with_values
from testing import models
from testing.gpu_cases import GPT2, LLAMA

RESULTS = Path(__file__).parent / "results"
ROWS, TABLE = RESULTS / "paging.jsonl", RESULTS / "paging.md"

BYTES_PER_S, FLOPS_PER_S = 3.38e12, 598e12
LINKS_GB_S = (12, 25, 55, 200)

Row = dict[str, str | float | int | None]


def mistral() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Eight layers of the shape of Mistral 7B, 8192 tokens."""
    config = transformers.MistralConfig(
        num_hidden_layers=8, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, max_position_embeddings=8192,
        sliding_window=None, use_cache=False,
    )  # fmt: skip
    ids = torch.zeros(1, 8192, dtype=torch.long)
    return transformers.MistralForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def of_case(make: Callable[[], object]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    case = make()
    return case.model, case.kwargs  # type: ignore[attr-defined]


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]], Sequence[int]]] = {
    "llama8": (partial(of_case, LLAMA), (3000, 2117, 1700, 1288)),
    "mistral8": (mistral, (4922, 3446, 2461, 1717)),
    "gpt2-large": (partial(of_case, partial(GPT2, attention_dropout=0.0)), (3654, 2558, 1827)),
}
"""With budgets in MiB: shares of what keeping everything needs, the peak of torch.compile with
checkpoints as measured (2117), and those of checkpoints as predicted (1288, 1717)."""


def captured(name: str) -> tuple[CDGraph, list[str]]:
    """The graph of compiled kernels, for steps that let logits go, and the repeated layers."""
    with torch.device("meta"):
        model, kwargs = MODELS[name][0]()
        model = model.bfloat16()
    twin = twin_of(model)
    run = capture(twin, (), with_values(kwargs))
    options = Options(released=(1,), compile=True, without=("kernels-in-place",))
    return lower(run, 0, options).graph, list(checkpointing.repeated_blocks(twin))


def rows_of(name: str, links_gb_s: Sequence[int]) -> Iterator[Row]:
    graph, blocks = captured(name)
    profile = roofline(graph, Rates(BYTES_PER_S, FLOPS_PER_S))
    for link_gb_s in (given or None for given in links_gb_s):
        link = f"{link_gb_s}GB/s" if link_gb_s else None
        options = Options(
            cache=False, bound_time_limit_s=0.0, host="1TiB" if link else None, link=link
        )
        problem = problem_of(graph, profile, options)
        for budget_mib in MODELS[name][1]:
            yield {"model": name, "link": link_gb_s, **planned(problem, budget_mib, options)}
        for way, made in blind(problem, blocks, link_gb_s):
            yield {"model": name, "link": link_gb_s, "way": way, **made}


BLOCKS = "blocks of a Llama of width 1024"
MB_S, LAYERS = (None, 125, 250, 500, 1000), (4, 12)


def blocks_rows() -> Iterator[Row]:
    """`solve_blocks` within the measured peak of checkpoints of each layer; then the smallest plans
    of more layers."""
    torch.set_num_threads(1)
    for layers in LAYERS:
        case = models.llama(
            layers=layers, width=1024, heads=16, vocabulary=1024, batch=1, length=512
        )
        step = partial(_step, case.kwargs)
        checkpointed = checkpointing.per_block(case.model)
        budget_bytes = peak_live_bytes(partial(step, checkpointed), 1).peak_bytes
        case.model.zero_grad()
        step(case.model)
        expected = {name: p.grad.clone() for name, p in case.model.named_parameters()}
        within = [(link, budget_bytes) for link in MB_S] if layers == LAYERS[0] else []
        for link, budget in (*within, (None, "min"), (1000, "min")):
            named = {"host": "4GiB", "link": f"{link}MB/s"} if link else {}
            options = Options(cache=False, **named)  # type: ignore[arg-type]
            begin = time.process_time()
            solve_blocks(case.model, case.args, budget, sample_kwargs=case.kwargs, options=options)
            seconds = time.process_time() - begin
            plan = blocks_of(case.model)
            found = peak_live_bytes(partial(step, case.model), 1)
            case.model.zero_grad()
            step(case.model)
            yield {
                "model": BLOCKS,
                "layers": layers,
                "link": link,
                "way": "min" if budget == "min" else "checkpoints",
                "budget": budget_bytes,
                "promised": plan.peak_bytes,
                "measured": found.peak_bytes,
                "planned": round(100 * plan.overhead, 1),
                "paged": mib(plan.paged_bytes),
                "equal": all(
                    torch.equal(p.grad, expected[n]) for n, p in case.model.named_parameters()
                ),
                "seconds": round(seconds, 1),
                "where": where(),
            }
            restore_blocks(case.model)


def _step(kwargs: dict[str, torch.Tensor], module: nn.Module) -> None:
    module(**kwargs).loss.backward()  # the logits are let go


def blocks_table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"## {BLOCKS[0].upper()}{BLOCKS[1:]}"
    where_run, budget_bytes = rows[0]["where"], rows[0]["budget"]
    yield (
        f"\n`python -m benchmarks.paging --blocks`: {where_run}. Four layers, 512 tokens, float32, "
        "run on the CPU; `solve_blocks` within the measured peak of `torch.utils.checkpoint` of "
        f"each layer, {budget_bytes:,} bytes. Times are predicted, of the blocks, from measured "
        "operations and 0.8 of the link.\n"
    )
    yield "| link | promised | measured | time | MiB paged | eager's bits | planned in |"
    yield "|---" * 7 + "|"
    yield from (f"| {_of_blocks(row)}" for row in rows if row["way"] == "checkpoints")
    yield (
        "\nThe smallest plans. With a host the inputs of layers are there between the phases, and "
        "more layers need no more bytes.\n"
    )
    yield (
        "| layers | checkpoints | link | promised | measured | time | MiB paged | eager's bits | "
        "planned in |"
    )
    yield "|---" * 9 + "|"
    for row in rows:
        if row["way"] == "min":
            yield f"| {row['layers']} | {row['budget']:,} | {_of_blocks(row)}"


def _of_blocks(row: Row) -> str:
    link = f"{row['link']} MB/s" if row["link"] else "no host"
    return (
        f"{link} | {row['promised']:,} | {row['measured']:,} | {row['planned']:+.1f} % | "
        f"{row['paged']} | {'yes' if row['equal'] else 'no'} | {row['seconds']} s |"
    )


def planned(problem: Problem, budget_mib: int, options: Options) -> Row:
    once_ns = problem.graph.time_ns
    begin = time.process_time()
    try:
        plan = plan_anew(problem, Budget(size_bytes=budget_mib << 20), options)
    except InfeasibleBudget as error:
        return {"way": "planned", "budget": budget_mib, "least": error.minimum_bytes >> 20}
    seconds = time.process_time() - begin
    storages = [trip.data for trip in plan.trips]
    at_link = problem.graph
    if problem.host is not None:
        at_link = with_copies(problem.graph, storages, problem.host.link)
    return {
        "way": "planned",
        "budget": budget_mib,
        "peak": mib(plan.peak_bytes),
        "planned": over(plan.time_ns, once_ns),
        "bound": over(plan.certificate.bound_ns, once_ns),
        "at the link": over(simulate(at_link, plan.schedule).time_ns, once_ns),
        "paged": mib(sum(trip.size_bytes for trip in plan.trips)),
        "seconds": round(seconds, 1),
    }


def mib(size_bytes: int) -> int:
    return round(size_bytes / 2**20)


def over(time_ns: float, once_ns: int) -> float:
    """Percent."""
    return round(100 * (time_ns / once_ns - 1), 2)


def blind(
    problem: Problem, blocks: Sequence[str], link_gb_s: int | None
) -> Iterator[tuple[str, Row]]:
    graph, once_ns = problem.graph, problem.graph.time_ns
    eager, checkpointed = per_block(graph, blocks)
    if link_gb_s is None:
        made = simulate(eager, checkpointed)
        yield "checkpoint", result(made.peak_bytes, made.time_ns, once_ns)
        return
    link = HostLink(int(link_gb_s * 1e9), int(link_gb_s * 1e9))
    yield "checkpoint, inputs paged", all_paged(eager, checkpointed, link, once_ns)
    everything = all_paged(graph, keep_all(graph), link, once_ns)
    copied_bytes = sum(graph.data[d].size_bytes for d in saved(graph, keep_all(graph)))
    time_ns = once_ns + 2 * copied_bytes / link_gb_s
    yield "all saved paged at once", everything | {"at the link": over(time_ns, once_ns)}


def all_paged(graph: CDGraph, schedule: Schedule, link: HostLink, once_ns: int) -> Row:
    """All that lies between the phases goes out where it is last read, and comes back just before
    it is read: at the least bytes, and as early as these allow."""
    storages = saved(graph, schedule)
    turn, shift = len(graph.forward), len(storages)
    forward, backward = schedule.phases
    moved = [i if i < turn else i + shift for i in backward]
    asked = with_fetches(graph, storages)
    for k, d in enumerate(sorted(storages)):
        read = min(p for p, i in enumerate(moved) if d in asked.nodes[i].reads)
        moved.insert(read, turn + k)
    least = placed(graph, storages, (forward, tuple(moved)), link, 0)
    peak_bytes = simulate(least.graph, least.schedule).peak_bytes
    made = placed(graph, storages, (forward, tuple(moved)), link, peak_bytes)
    found = simulate(made.graph, made.schedule)
    paged_bytes = sum(graph.data[d].size_bytes for d in storages)
    row = result(found.peak_bytes, found.time_ns, once_ns)
    return row | {"paged": mib(paged_bytes)}


def saved(graph: CDGraph, schedule: Schedule) -> list[int]:
    alive = kept_data(graph, schedule)
    read = {d for i in schedule.phases[1] for d in graph.nodes[i].reads}
    kinds = {d.index for d in graph.data if d.kind is DataKind.ACTIVATION}
    large = {d for d in alive if graph.data[d].size_bytes >= LEAST_BYTES}
    return sorted(alive & read & kinds & large - {*graph.outputs, *graph.held})


def result(peak_bytes: int, time_ns: int, once_ns: int) -> Row:
    return {"peak": mib(peak_bytes), "at the link": over(time_ns, once_ns)}


def table(rows: Sequence[Row]) -> str:
    lines = [
        "# Paging to the host: predictions at prices of an H200",
        "",
        f"`python -m benchmarks.paging`, {where()}: roofline prices, {BYTES_PER_S:g} B/s and "
        f"{FLOPS_PER_S:g} flop/s, compiled kernels, links each way with both ways at once. Percent "
        "over running everything once, with everything kept; plans are made for 0.8 of the link, "
        "and in brackets is what they take if that is all there is, and what is proven of every "
        "plan then, of some links. MiB paged beside it. Blind ways have peaks of their own.",
        "",
    ]
    links = " | ".join(f"{link} GB/s" for link in LINKS_GB_S)
    for name in dict.fromkeys(str(row["model"]) for row in rows if row["model"] != BLOCKS):
        own = [row for row in rows if row["model"] == name]
        lines += [f"## {name}", "", f"| | MiB | no host | {links} |", "|---" * 7 + "|"]
        keys = dict.fromkeys((row["way"], row.get("budget")) for row in own)
        for way, budget in keys:
            cells = {
                row["link"]: row for row in own if (row["way"], row.get("budget")) == (way, budget)
            }
            peak = budget or next(iter(cells.values()))["peak"]
            shown = " | ".join(_cell(cells.get(link)) for link in (None, *LINKS_GB_S))
            lines.append(f"| {way} | {peak} | {shown} |")
        seconds = [float(row["seconds"] or 0) for row in own if "seconds" in row]
        lines += ["", f"Planning took {max(seconds):.1f} s of CPU time at most.", ""]
    own = [row for row in rows if row["model"] == BLOCKS]
    return "\n".join([*lines, *(blocks_table(own) if own else ()), ""])


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "at the link" not in row:
        return f"least {row['least']} MiB"
    shown = f"{row['at the link']:+.1f}"
    if "bound" in row:
        shown += f" ({row['planned']:+.1f} ≥ {row['bound']:+.1f})"
    elif row.get("planned") not in (None, row["at the link"]):
        shown += f" ({row['planned']:+.1f})"
    return f"{shown}, {row['paged']}" if row.get("paged") else shown


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--links", nargs="*", type=int, default=[0, *LINKS_GB_S])
    parser.add_argument("--blocks", action="store_true")
    given = parser.parse_args()
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    if given.blocks:
        rows = [r for r in rows if r["model"] != BLOCKS]
        rows += blocks_rows()
    for name in () if given.blocks else given.models:
        rows = [r for r in rows if r["model"] != name or (r["link"] or 0) not in given.links]
        for row in rows_of(name, given.links):
            rows.append(row)
            print(json.dumps(row), flush=True)
    names = [*MODELS, BLOCKS]
    rows.sort(key=lambda r: (names.index(r["model"]), r.get("layers", 0), r["link"] or 0))
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = table(rows).split("\n")
    if given.blocks:  # where the predictions are from stays
        lines[2] = TABLE.read_text().split("\n")[2]
    TABLE.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
