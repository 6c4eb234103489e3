"""Refusals: what cannot be planned, a row each: when it is noticed, by which rule, message and
remedy.

Rows with a rule are checked by `refuse`, one loop for each stage. Others are noticed deep inside of
a recording, and raised there by name. docs/limits.md lists them; operators that are refused are
rows of `operators.rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack

from rockplan import errors
from rockplan.graph_builder.operators.rows import (
    FUNCTIONAL,
    IN_PLACE_ON_PROCESSES,
    OF_UNKNOWN_SIZES,
    PAD,
)
from rockplan.python_state.hooks import foreign_hooks, is_foreign
from rockplan.python_state.sharding import shards

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# weight_norm and spectral_norm compute weights in hooks, prepare_qat quantizes results in hooks,
# transformers collects outputs in hooks, parallelize_module places arguments and results in hooks.
_PURE_HOOKS = (
    "torch.nn.utils.",
    "torch.ao.quantization.",
    "transformers.",
    "torch.distributed.tensor._api",
    "torch.distributed.tensor.parallel.",
)


AS_OPERATOR = (
    "give the autograd.Function around it to rockplan.opaque, make it an operator "
    "(torch.library.custom_op with register_fake and register_autograd; for Triton "
    "torch.library.triton_op), or leave it outside of the planned module"
)
"""Remedy for a kernel."""

WITHOUT_SCRIPTS = (
    "e3nn makes it of its own code: call e3nn.set_optimization_defaults(jit_script_fx=False) "
    "before the model is made"
)
"""Remedy for modules of e3nn."""

RUN_ONCE = "run the module once on the sample, then plan it"
"""Remedy if only the first call differs."""

PUT_INTO_A_DICTIONARY = (
    "return what it adds there, or put it into a dictionary or a list that is an argument, where "
    "planned calls leave it, too (in place of a mapping of another class, such as BatchEncoding, "
    "pass `dict(batch)`)"
)

LEFT_OUT = (
    "Leave the checkpoint out (`model.set_grad_checkpointing(False)`, "
    "`model.gradient_checkpointing_disable()`, or what else the model has): a plan computes again "
    "by itself"
)
"""Remedy for a checkpoint."""

DECIDED = (
    "as a Python bool or number, or as a tensor of bools or integers (each such value is a kind of "
    "call, planned for once)"
)
"""How the caller passes in a decision of the forward."""

DRAWN = (
    f"draw before the call, and pass in what was drawn: what the forward decides by {DECIDED}, "
    "what it computes with as a tensor"
)
"""Remedy for random draws of Python."""


WITHOUT_FLAT_PARAMETERS = (
    "call fully_shard (torch.distributed.fsdp) on the whole planned module instead, or wrap it in "
    "DistributedDataParallel"
)
"""Remedy for FullyShardedDataParallel, which keeps the parameters of a module in one."""


class When(StrEnum):
    """The stage at which a refusal is noticed."""

    MODULE = "The module, before its forward runs"
    FORWARD = "What the forward does"
    RESULT = "The result"
    GRADIENTS = "Gradients"
    NEXT_CALL = "What the next call would do"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One kind of model that cannot be planned. says, remedy: text, with {places} to fill in. rule:
    yields what to fill in, for each finding in a module; None if it is noticed elsewhere."""

    name: str
    says: str
    remedy: str
    when: When = When.FORWARD
    rule: Callable[[nn.Module], Iterator[dict[str, Any]]] | None = None
    kind: type[errors.RockplanError] = errors.UnsupportedModel

    def text(self, **facts: Any) -> str:
        """Return the message. facts: fill the places; a fact `remedy` replaces the row's remedy."""
        remedy = facts.pop("remedy", self.remedy.format(**facts))
        says = self.says.format(**facts)
        joined = ". " if remedy[:1].isupper() else "; "
        return f"{says}{joined}{remedy}" if remedy else says

    def error(self, module_path: str | None = None, **facts: Any) -> errors.RockplanError:
        """Return the error. module_path: of the submodule in question."""
        if not issubclass(self.kind, errors.CaptureError):
            return self.kind(self.text(**facts))
        return self.kind(self.text(**facts), module_path=module_path)

    def at(self, module: str, source: str, **facts: Any) -> errors.CaptureError:
        """Return the error with its place in the user's model."""
        assert issubclass(self.kind, errors.CaptureError)
        return self.kind.at(module, source, self.text(**facts))


def refuse_without_memory(module: nn.Module) -> None:
    """Raise InvalidInput for parameters and buffers without memory (lazy, or on meta)."""
    _refuse([NAMED["lazy"], NAMED["meta"]], module)


def refuse(when: When, module: nn.Module) -> None:
    """Raise the first finding of the rules of stage `when`."""
    _refuse([row for row in REFUSALS if row.when is when], module)


def _refuse(rows: Iterable[Refusal], module: nn.Module) -> None:
    for row in rows:
        for finding in row.rule(module) if row.rule else ():
            raise row.error(**finding)


# Rules


def _function_modes(module: nn.Module) -> Iterator[dict[str, Any]]:
    # What such a mode does may depend on its state, and on functions of which a plan has only the
    # operators that they call.
    if torch._C._is_torch_function_mode_enabled():
        for mode in filter(is_foreign, _get_current_function_mode_stack()):
            yield {"mode": type(mode).__qualname__}


def _scripted(module: nn.Module) -> Iterator[dict[str, Any]]:
    for path, m in module.named_modules():
        if isinstance(m, torch.jit.ScriptModule):
            part = f"submodule '{path}'" if path else "model"
            by_e3nn = any(type(o).__module__.startswith("e3nn.") for o in around(module, path))
            remedy = {"remedy": WITHOUT_SCRIPTS} if by_e3nn else {}
            yield {"part": part, "kind": type(m).__name__, "module_path": path, **remedy}


def around(module: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yield the module at `path` and those that it is in, the outermost first."""
    yield module
    for name in filter(None, path.split(".")):
        module = module.get_submodule(name)
        yield module


def _lazy(module: nn.Module) -> Iterator[dict[str, Any]]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return ({"tensor": name} for name, tensor in tensors if is_lazy(tensor))


def _on_meta(module: nn.Module) -> Iterator[dict[str, Any]]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return ({"tensor": name} for name, tensor in tensors if tensor.device.type == "meta")


def _hooks_on_all(module: nn.Module) -> Iterator[dict[str, Any]]:
    # Those of the root run around the planned forward as always; those of libraries that compute
    # weights are part of the graph.
    hooks = foreign_hooks(*(getattr(module_hooks, f"_global{name}") for name in HOOKS))
    if hooks and any(True for _ in module.children()):
        yield {"hook": _called(hooks[0])}


def _hooks_on_submodules(module: nn.Module) -> Iterator[dict[str, Any]]:
    for path, m in module.named_modules():
        hooks = [h for name in HOOKS for h in (m.__dict__.get(name) or {}).values()]
        foreign = [h for h in hooks if not str(h.__module__).startswith(_PURE_HOOKS)]
        if path and foreign:
            yield {"path": path, "hook": _called(foreign[0]), "module_path": path}


def _cached(module: nn.Module) -> Iterator[dict[str, Any]]:
    for path, m in module.named_modules() if parametrize._cache_enabled else ():
        if parametrize.is_parametrized(m):
            yield {"module_path": path, "tensor": next(iter(m.parametrizations))}


def _called(hook: Any) -> Any:
    return getattr(hook, "__qualname__", hook)


# Rows

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "function mode",
        "{mode} is a TorchFunctionMode, and what it does to functions of PyTorch would not be done "
        "in a planned step, which calls operators",
        "Plan and call the module outside of it; or use the original module there, which calls of "
        "a planned one do with Options(on_mismatch='original')",
        when=When.MODULE,
        rule=_function_modes,
    ),
    Refusal(
        "TorchScript",
        "{part} is a {kind}: what TorchScript runs cannot be followed",
        "Plan the model with the module that was scripted or traced in its place",
        when=When.MODULE,
        rule=_scripted,
    ),
    Refusal(
        "lazy",
        "{tensor} is lazy: run the module once on a sample, then plan it",
        "",
        when=When.MODULE,
        rule=_lazy,
        kind=errors.InvalidInput,
    ),
    Refusal(
        "meta",
        "{tensor} is on the meta device: materialize the module, then plan it",
        "Call to_empty and what sets its weights before; what fits, rockplan.fit says without "
        "memory",
        when=When.MODULE,
        rule=_on_meta,
        kind=errors.InvalidInput,
    ),
    Refusal(
        "shard",
        "the parameter {tensor} is a DTensor that fully_shard has made, which a plan would compute "
        "with before it is gathered",
        "Plan the blocks that are sharded each by itself (fully_shard of each, then "
        "rockplan.solve_blocks), or plan the module and shard it as a whole then",
        when=When.MODULE,
        rule=lambda module: ({"tensor": f"'{name}'"} for name in shards(module)),
    ),
    Refusal(
        "hook on all modules",
        "the hook {hook} on all modules (register_module_forward_hook and the like) would not run "
        "in the submodules of a planned step",
        "remove it, or use the original module while it is there",
        when=When.MODULE,
        rule=_hooks_on_all,
    ),
    Refusal(
        "hook on a submodule",
        "in module '{path}': the hook {hook} on a submodule would not run in a planned step",
        "remove it before planning, or put it on the root module or on the parameters",
        when=When.MODULE,
        rule=_hooks_on_submodules,
    ),
    Refusal(
        "cached parametrization",
        "torch.nn.utils.parametrize.cached() keeps '{tensor}' from one call to the next, and a "
        "plan, which is for one call, does not",
        "enter it inside of the forward, or leave it out",
        when=When.MODULE,
        rule=_cached,
    ),
    Refusal("nested tensor", f"{{tensor}} is a nested tensor, {OF_UNKNOWN_SIZES}", PAD),
    Refusal(
        "layout",
        "{tensor} is a tensor with layout {layout}, which cannot be planned",
        "use dense tensors (for nn.Embedding: sparse=False)",
        when=When.MODULE,
    ),
    Refusal(
        "class of tensors",
        "{tensor} is a {kind}, a class of tensors that says itself what operators do, which a plan "
        "would not ask",
        "of a parameter: have its class say what it consists of (`__tensor_flatten__`), and of a "
        "trained one how it is put together (`__tensor_unflatten__`), or freeze it; else use a "
        "plain tensor (dequantize it, or pass its parts or `tensor.as_subclass(torch.Tensor)`)",
        when=When.MODULE,
    ),
    Refusal(
        "distributed tensor",
        "{tensor} is a DTensor that {why}, of which nobody has shown that plans compute what eager "
        "execution does",
        "Place it by Shard, Replicate and Partial, in equal parts (pad it to a multiple), or name "
        "parts beside it as the blocks (rockplan.solve_blocks(..., blocks='layers.*.mlp'))",
    ),
    Refusal(
        "context parallel",
        "context_parallel has attention exchange keys and values between processes by rules of its "
        "own",
        "Name parts beside it as the blocks (rockplan.solve_blocks(..., blocks='layers.*.mlp')), "
        "or exchange these in the functional form of collectives",
    ),
    Refusal(
        "draw of a distributed tensor",
        "{operator} draws random numbers for a DTensor, on a device where DTensor moves the "
        "generator itself, which a plan would not do again",
        "Have it get a local tensor (Dropout after RowwiseParallel, whose results are local ones), "
        "set its probability to 0, or name parts beside it as the blocks",
    ),
    Refusal(
        "leftover",
        "the forward leaves a tensor in {place}, which a planned run cannot reproduce (it is "
        "removed from there)",
        "Return it, or keep it outside of the module",
    ),
    Refusal(
        "generator",
        "{operator} draws from a torch.Generator object, which cannot be written into a plan",
        "draw from the default generator, or before the call",
    ),
    Refusal(
        "unknown result",
        "what {operator} returns is not known before it runs, so it cannot be planned",
        "leave it outside of the module",
    ),
    Refusal(
        "no rule",
        "{operator} is an operator without a rule for what it returns: describe an empty result of "
        "it with `register_fake` (torch.library.custom_op has that method)",
        "",
    ),
    Refusal(
        "shape in place",
        "{operator} changes the shape of an input, a parameter or a buffer in place, which a "
        "planned run would not do",
        "use the operator without the underscore",
    ),
    Refusal(
        "recurrent layer of cuDNN",
        "a recurrent layer of cuDNN (nn.LSTM, nn.GRU, nn.RNN on CUDA) takes its weights from one "
        "storage, and a generator of its own for dropout, which a plan cannot follow",
        "plan the parts before and after it, or switch cuDNN off where the layer runs (with "
        "torch.backends.cudnn.flags(enabled=False))",
    ),
    Refusal(
        "argument in place",
        "the forward changes a tensor that requires a gradient in place, which is an argument "
        "(leaf {leaves} of the arguments is the result of other operations, else eager would fail, "
        "too); autograd would not be told of the change by a planned step",
        "Change a clone of it (x = x.clone()), or use the operator without the underscore",
    ),
    Refusal(
        "write in a checkpoint",
        "{operator}{place} changes a buffer or another tensor of the caller's (statistics of "
        "BatchNorm, vectors of spectral norm) inside of torch.utils.checkpoint, which eager does "
        "once more where it runs that again in the backward pass, and a plan does not",
        f"{LEFT_OUT}, and the original without it changes these once, too",
    ),
    Refusal(
        "state of a checkpoint",
        "the forward changes {place} ({former} -> {now}) of a torch.utils.checkpoint, in it or "
        "later: eager runs its function again with what is there then, and a plan does not",
        LEFT_OUT,
    ),
    Refusal(
        "values of a function of PyTorch",
        "a function of PyTorch reads values of a tensor while the forward runs, of which a plan "
        "knows shapes alone (those of a PackedSequence, for instance)",
        "Pass padded tensors, or leave that function outside of the module",
        kind=errors.ValueDependentControlFlow,
    ),
    Refusal(
        "memory of an array",
        "the forward writes into the memory of an array that it gets from a tensor (.numpy(), "
        "numpy.asarray), which a planned run would not do",
        "write to a copy (array.copy()), or to the tensor",
    ),
    Refusal(
        "cross entropy",
        "cross entropy with class weights, label smoothing and the mean selects the targets that "
        "are not ignored, a shape that depends on values; a plan needs static shapes",
        "Compute this loss outside of the module, or leave out the weights or the smoothing",
        kind=errors.DataDependentShape,
    ),
    Refusal(
        "other memory",
        "the forward assigns to the `.data` of a tensor, which gives it other memory, and a "
        "planned run would not see it",
        "write into it instead: `with torch.no_grad(): tensor.copy_(...)`",
    ),
    Refusal(
        "moved module",
        "the forward moves a submodule, a {kind}, to another device or dtype, which a planned run "
        "would not do",
        "move it before it is planned (model.to(...)), or move what it is called with",
    ),
    Refusal(
        "seeds",
        "the forward seeds torch's generator, or saves and restores its state (torch.manual_seed, "
        "torch.random.fork_rng), which a planned step would not repeat",
        "seed before the call, or pass the numbers in as a tensor",
    ),
    Refusal(
        "compiler",
        "the forward calls torch.compile, or a function that does (flex_attention), which leaves "
        "in PyTorch's caches what a recording replaces",
        "Compile before the call. In place of flex_attention take scaled_dot_product_attention "
        "(attn_implementation='sdpa'), or name parts beside it as the blocks "
        "(rockplan.solve_blocks(..., blocks='layers.*.mlp'))",
    ),
    Refusal(
        "hook on a tensor",
        "the forward registers a hook on a tensor, which would not run in a planned step",
        "use a custom autograd.Function, or hook the parameters",
    ),
    Refusal(
        "objects between processes",
        f"the forward {IN_PLACE_ON_PROCESSES}",
        FUNCTIONAL,
    ),
    Refusal(
        "iterator of the module",
        "the forward takes the next of an iterator that the module keeps (a {kind}), which a "
        "planned step would not advance",
        DRAWN,
    ),
    Refusal(
        "iterator as an argument",
        "{place} is an iterator (a {kind}), which a planned step would not advance",
        "pass a list",
    ),
    Refusal(
        "generator of Python",
        "the forward draws from {place} (a {kind}), which a planned step would repeat for ever",
        f"{DRAWN}. Models of speech of transformers draw where no `mask_time_indices` is passed, "
        "unless `config.apply_spec_augment` is False",
    ),
    Refusal(
        "value",
        "{who} reads {what} (.item(), bool(), float(), .tolist(), .numpy(), str(), print() or "
        "`if` on a tensor), so the operations may differ from call to call and cannot be planned",
        "Keep the decision on the tensor (torch.where), or move it out of the module",
        kind=errors.ValueDependentControlFlow,
    ),
    Refusal(
        "shape",
        "the shape of the result of {operator} depends on {what}; a plan needs shapes that are "
        "known before the call (masks, counts and indices that are arguments, or made of integer "
        "arguments, are)",
        "Replace it by a masked operation (torch.where, multiplication by the mask)",
        kind=errors.DataDependentShape,
    ),
    Refusal(
        "unwritten memory",
        "{reader} memory that {maker} has made (torch.empty) and no operator of PyTorch has "
        "written to",
        "Either a kernel writes it where a plan does not see it, or it is skipped while a model is "
        f"traced (as in flash-attention 4): {AS_OPERATOR}. Or what was in memory before is read: "
        "fill it (torch.zeros)",
    ),
    Refusal(
        "address",
        "{function} asks for the address of a tensor (data_ptr){code}{caller}. A plan consists of "
        "operators of PyTorch, and does not see what a kernel does with memory",
        f"If there is a kernel, {AS_OPERATOR}; to see whether two tensors are one, compare the "
        "tensors (`a is b`)",
    ),
    Refusal(
        "writes of a Triton kernel",
        "nobody can say what the Triton kernel {kernel} writes into: {why}",
        AS_OPERATOR[0].upper() + AS_OPERATOR[1:],
    ),
    Refusal(
        "read of what was overwritten",
        "{operator} reads a tensor of the forward pass that a Triton kernel has written over in "
        "the backward pass",
        AS_OPERATOR[0].upper() + AS_OPERATOR[1:],
    ),
    Refusal(
        "argument of a Triton kernel",
        "the Triton kernel {kernel} is given a {kind}, of which a plan cannot tell whether it is "
        "the same at the next call",
        "pass tensors, numbers and text; or " + AS_OPERATOR,
    ),
    Refusal(
        "subclass of an opaque function",
        "{function} is derived from {base}, an opaque function, and was itself not given to "
        "rockplan.opaque",
        "declare it: rockplan.opaque({function})",
    ),
    Refusal(
        "argument of an opaque function",
        "{function}, an opaque function, is given a {kind}, of which a plan cannot tell whether it "
        "is the same at the next call",
        "pass tensors, and of other things numbers, text and functions",
    ),
    Refusal(
        "run of an opaque function",
        "{function}, an opaque function, does not run on made-up arguments (numbers in [0, 1), "
        "zeros where they are integers), by which a plan learns what it returns: {error}",
        "Make it an operator that says so (torch.library.custom_op with register_fake and "
        "register_autograd)",
    ),
    Refusal(
        "draws of an opaque function",
        "{function}, an opaque function, draws random numbers, which a plan could not repeat",
        "draw before it, and pass in what was drawn",
    ),
    Refusal(
        "view by an opaque function",
        "{function}, an opaque function, returns or saves memory as another kind of numbers, which "
        "a plan does not follow",
        "return a copy",
    ),
    Refusal(
        "kept argument",
        "an argument of the sample is also kept in {place}, and something compares objects by "
        "`is`, so the forward could see that they are one, which a plan would take for granted",
        "plan with a copy of it",
        when=When.MODULE,
    ),
    Refusal(
        "kept tensor",
        "{who} assigns a tensor to {place}, which a planned run cannot reproduce",
        f"Return it, or keep it outside of the module; if only the first call does, {RUN_ONCE}",
    ),
    Refusal(
        "kept in a cache",
        "a tensor that depends on more than constants is kept in the cache of {place} "
        "(functools), where the next call would find it, and a planned run would not",
        "compute it without the cache",
    ),
    Refusal(
        "kept change",
        "{who} changes {place} ({former} -> {now}), which a planned run would not do",
        "return it, or keep it outside of the module (a count also in a registered buffer); if "
        f"only the first call does, {RUN_ONCE}",
        when=When.NEXT_CALL,
    ),
    Refusal(
        "attribute of a fake tensor",
        "{tensor} has an attribute '{attribute}', a name that the fake tensors have with which a "
        "forward is recorded",
        "give it another name",
        when=When.MODULE,
    ),
    Refusal(
        "attribute of a result",
        "the forward sets the attribute '{attribute}' of leaf {position} of its result, which "
        "the result of a planned run would not have",
        "return it",
        when=When.RESULT,
    ),
    Refusal(
        "question",
        "the forward asks {tensor} for `{name}` ({what}), which may be another at the next call of "
        "a planned module",
        "decide on it outside, and pass in what follows",
    ),
    Refusal(
        "opaque result",
        "leaf {position} of the module's result is a {kind}, an opaque container whose tensors "
        "cannot be followed",
        "return tensors in tuples, lists, dictionaries or a registered pytree; where it is a "
        "key-value cache, pass use_cache=False (config.use_cache = False)",
        when=When.RESULT,
    ),
    Refusal(
        "result that is an argument",
        "leaf {position} of the module's result is a parameter that requires a gradient, or a view "
        "of one or of such an input",
        "return a clone of it",
        when=When.RESULT,
    ),
    Refusal(
        "result without a gradient",
        "leaf {position} of the module's result has memory that was changed since an "
        "autograd.Function returned it, and no gradient in eager either ({error})",
        "have the Function return a clone, or change a clone",
        when=When.RESULT,
    ),
    Refusal(
        "result with a gradient of its own",
        "leaf {position} of the module's result is a tensor whose gradient the forward asks for "
        "(requires_grad_() or retain_grad()), and would stay without it in a planned step",
        "detach it, call retain_grad() on the result, or pass in the tensor that requires a "
        "gradient",
        when=When.RESULT,
    ),
    Refusal(
        "nothing to differentiate",
        "no output of the module depends on a parameter or an input that requires a gradient, so "
        "there is no backward pass to plan",
        "Unfreeze a parameter, or set requires_grad on the sample input",
        when=When.RESULT,
        kind=errors.NothingToDifferentiate,
    ),
    Refusal(
        "detached",
        "the result requires a gradient, but depends on no parameter and no input by autograd "
        "(they are detached on the way to it), so there is no backward pass to plan",
        "",
        when=When.RESULT,
        kind=errors.NothingToDifferentiate,
    ),
    Refusal(
        "flat parameters",
        "the module's parameters are parts of one of FullyShardedDataParallel, where a planned "
        "module cannot be",
        WITHOUT_FLAT_PARAMETERS,
        when=When.GRADIENTS,
    ),
    Refusal(
        "foreign parameter",
        "the result depends on a tensor of shape {shape} that requires a gradient and is neither a "
        "parameter of the module nor an argument, so a planned step would not compute its gradient",
        "register it as a parameter (nn.Parameter, nn.ParameterList), pass it as an argument, or "
        "detach it",
        when=When.GRADIENTS,
    ),
    Refusal(
        "gradient by values",
        "eager execution computes a gradient in a way that depends on values, which a plan cannot "
        "see",
        "It is that of {operator}",
        when=When.GRADIENTS,
    ),
    Refusal(
        "write of what has a gradient",
        "the forward writes something that has a gradient into {tensor}, which has none: autograd "
        "would not be told of that by a planned step",
        "Write what is detached (h.detach()), or return it",
        when=When.GRADIENTS,
    ),
    Refusal(
        "requires_grad",
        "the forward changes `requires_grad` of {tensor}, which a planned step would not do",
        "change it before the call, or take another tensor (x = x.detach()); of a tensor of the "
        f"module only the first call does: {RUN_ONCE}",
        when=When.GRADIENTS,
    ),
    Refusal(
        "backward in the forward",
        "the forward, or a backward of its own, adds to the `.grad` of {tensor} itself (backward() "
        "in the forward or in a custom autograd.Function), which a planned step would not do",
        "use torch.autograd.grad and return the gradients. Where it is a checkpoint, leave it out: "
        "a plan computes again by itself",
        when=When.GRADIENTS,
    ),
    Refusal(
        "another next call",
        "{of}: the forward changes {place}, and the next call does not do the same as this one, "
        "which a planned run would repeat for ever",
        "Keep a position in a tensor: self.ring.index_copy_(0, self.at.reshape(1), value[None]) "
        "in place of self.ring[int(self.at)] = value. If only the first call is another one "
        f"(values set by the first batch), {RUN_ONCE}",
        when=When.NEXT_CALL,
    ),
    Refusal(
        "fresh constant",
        "the forward writes in place to a tensor that it has made of numpy's or Python's data "
        "(torch.from_numpy, torch.as_tensor), which would be the same tensor at every call of a "
        "planned module",
        "write to a clone of it",
        when=When.NEXT_CALL,
    ),
)

NAMED = {row.name: row for row in REFUSALS}
"""The rows by name."""
