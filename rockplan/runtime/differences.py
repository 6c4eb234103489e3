"""Differences: what differs in a call, or in the module, from what was planned, in words.

takes: calls as `described_call` describes them when they are planned, signatures of modules.
returns: sentences such as "input_ids: 4x65, planned 4x64", and advice how to avoid planning again.
For messages only: `runtime.guards` decides whether a plan runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rockplan.python_state import trees
from rockplan.python_state.autocast import cast_is_kept
from rockplan.python_state.distributed import strides_of
from rockplan.python_state.walk import named_arguments
from rockplan.runtime.guards import (
    ModuleSignature,
    changed_attribute,
    has_other_class,
    module_entries,
)
from rockplan.runtime.switches import switches_in_words

Aspects = tuple[tuple[str, str], ...]
"""(aspect, text) of a leaf of the arguments, such as ("dtype", "float32"); the first names it."""

_LONGEST = 40
"""Characters of a value that a message shows."""

_MOST = 4
"""Differences that a message lists."""


@dataclass(frozen=True, slots=True)
class DescribedCall:
    """A call in words. leaves: (name, aspects) of the arguments; settings: (name, text) of
    PyTorch's switches."""

    leaves: tuple[tuple[str, Aspects], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()


NOTHING_SAID = DescribedCall()


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference. advice: how to avoid it, '' if nothing is known; is_value: it is in a plain
    value that Python reads from the module or from tensors, so that every call may bring another
    one."""

    text: str
    advice: str = ""
    is_value: bool = False


@dataclass(frozen=True, slots=True)
class Differences:
    """All differences between a call and what was planned."""

    each: tuple[Difference, ...]

    @property
    def advice(self) -> str:
        """The first advice of any difference, '' if there is none."""
        return next((d.advice for d in self.each if d.advice), "")

    @property
    def has_values(self) -> bool:
        return any(d.is_value for d in self.each)

    def __str__(self) -> str:
        more = len(self.each) - _MOST
        shown = "; ".join(d.text for d in self.each[:_MOST])
        return f"{shown}; and {more} more" if more > 0 else shown


def described_call(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DescribedCall:
    """Describe the arguments of a call in words, named by the parameters of `forward`, and
    PyTorch's switches as they are now."""
    arguments = named_arguments(forward, args, kwargs)
    leaves = [(f"{n}{path}", leaf) for n, a in arguments for path, leaf in trees.named_leaves(a)]
    first: dict[int, str] = {}
    described = tuple((n, _aspects(leaf, n, first)) for n, leaf in leaves)
    one = ", ".join(f"{b} is {a}" for a, b in trees.shared((args, kwargs))) or "none"
    return DescribedCall(described, (("containers that are one", one), *switches_in_words()))


def _aspects(leaf: Any, name: str, first: dict[int, str]) -> Aspects:
    """first: identity of a tensor -> the name under which it was met first, to which it is
    added."""
    if not isinstance(leaf, torch.Tensor):
        return (("value", _shown(leaf)),)
    shape = "x".join(map(str, leaf.shape)) or "a scalar"
    other = first.setdefault(id(leaf), name)
    return (
        ("shape", shape),
        ("dtype", str(leaf.dtype).removeprefix("torch.")),
        ("device", str(leaf.device)),
        ("gradient", "requires a gradient" if leaf.requires_grad else "requires no gradient"),
        ("casts", "cast once by autocast" if cast_is_kept(leaf) else "cast at each use"),
        (
            "strides",
            f"strides {strides_of(leaf)}" if leaf.layout is torch.strided else "no strides",
        ),
        ("class", type(leaf).__qualname__),
        ("same", "a tensor of its own" if other == name else f"the same tensor as {other}"),
        ("memory", str(leaf.layout)),
        ("lazy", f"conjugate: {leaf.is_conj()}, negative: {leaf.is_neg()}"),
    )


_SHOWN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def _shown(value: object) -> str:
    if type(value) not in _SHOWN:
        return f"a {type(value).__qualname__}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def call_differences(now: DescribedCall, then: DescribedCall) -> tuple[Difference, ...]:
    """List what differs in the call `now` from the planned `then`: arguments, then switches."""
    leaves, planned = dict(now.leaves), dict(then.leaves)
    names = [n for n in {**leaves, **planned} if leaves.get(n) != planned.get(n)]
    differences = [_leaf_difference(n, leaves.get(n), planned.get(n)) for n in names]
    before = dict(then.settings)
    changed = [(name, text) for name, text in now.settings if before.get(name, text) != text]
    differences += [
        Difference(f"{name}: {text}, planned {before[name]}", _ADVICE.get(name, ""))
        for name, text in changed
    ]
    return tuple(differences)


def _leaf_difference(name: str, now: Aspects | None, then: Aspects | None) -> Difference:
    aspects, planned = dict(now or ()), dict(then or ())
    if aspects.keys() != planned.keys():
        texts = (now[0][1] if now else "not passed", then[0][1] if then else "without")
        return Difference(f"{name}: {texts[0]}, planned {texts[1]}", _A_SAMPLE.format(name))
    changed = [aspect for aspect in aspects if aspects[aspect] != planned[aspect]]
    if "shape" in changed:
        changed = [aspect for aspect in changed if aspect not in ("strides", "memory")]
    now_text, then_text = ("; ".join(of[a] for a in changed) for of in (aspects, planned))
    advice = _LENGTHS if "shape" in changed else _A_VALUE.format(name) if "value" in changed else ""
    what = "which arguments are one tensor: " if "same" in changed else ""
    return Difference(f"{what}{name}: {now_text}, planned {then_text}", advice)


_LENGTHS = (
    "Have fewer shapes: pad lengths to a multiple (`pad_to_multiple_of` of the collators of "
    "transformers), drop the smaller last batch"
)
_A_SAMPLE = "Plan with a sample that is like the batches of training ({0})"
_ADVICE = {
    "autocast": (
        "Plan under the autocast of training: `with torch.autocast(...):` around the call of "
        "rockplan, whatever trainer opens it later"
    )
}
"""Switch -> how to avoid that it differs."""
_A_VALUE = "Pass {0} as a tensor, if the forward computes with it"
_OF_MODULE = "If the forward does not read what changes, keep it outside of the module"


def module_differences(signature: ModuleSignature) -> tuple[Difference, ...]:
    """List how the module tree differs now from what `signature` recorded: modes, tensors, classes,
    submodules, hooks, and the first attribute whose value differs."""
    paths = {id(m): path for path, m in signature.entries[0].module.named_modules()}
    texts = [*_changed_modes(signature, paths), *_changed_tensors(signature, paths)]
    for entry in filter(has_other_class, signature.entries):
        kinds = type(entry.module).__qualname__, entry.kind.__qualname__
        path = paths.get(id(entry.module), "")
        texts.append(f"class of '{path}': {kinds[0]}, planned {kinds[1]}")
    for entry in signature.entries:
        if tuple(entry.module._modules.items()) != entry.children:
            path = paths.get(id(entry.module), "")
            texts.append(f"submodules of '{path}'" if path else "submodules of the module")
    if not signature.hooks.hold():
        texts.append("hooks of submodules")
    differences = [*map(Difference, texts)]
    name = changed_attribute(signature)
    if name is not None:
        text = _changed_value(signature, paths, name)
        differences.append(Difference(text, _OF_MODULE, is_value=True))
    return tuple(differences)


def _changed_modes(signature: ModuleSignature, paths: Mapping[int, str]) -> Iterator[str]:
    flipped = [e for e in signature.entries if e.attributes["training"] != e.module.training]
    of_root = bool(flipped) and flipped[0] is signature.entries[0]
    for entry in flipped[:1] if of_root else flipped:
        now, then = ("train", "eval") if entry.module.training else ("eval", "train")
        where = "" if of_root else f" of '{paths.get(id(entry.module), '')}'"
        yield f"training flag{where}: {now}, planned {then}"


def _changed_tensors(signature: ModuleSignature, paths: Mapping[int, str]) -> Iterator[str]:
    entries = {id(e.module): e for e in module_entries(signature.entries[0].module)}
    for entry in signature.entries:
        if id(entry.module) not in entries:
            continue
        path = paths.get(id(entry.module), "")
        now = {(kind, name): key for kind, name, _, key in entries[id(entry.module)].tensors}
        then = {(kind, name): key for kind, name, _, key in entry.tensors}
        for kind, own in {**now, **then}:
            a, b = (_key_texts(of.get((kind, own))) for of in (now, then))
            changed = [(x, y) for x, y in zip(a, b, strict=False) if x != y]
            if changed:
                name = f"{path}.{own}" if path else own
                what = "parameter" if kind == "_parameters" else "buffer"
                yield f"{what} '{name}': {changed[0][0]}, planned {changed[0][1]}"


def _key_texts(key: tuple[Any, ...] | None) -> tuple[str, ...]:
    if not key:
        return ("none",)
    requires_grad, dtype, shape, device, stride, *inside = key
    return (
        "x".join(map(str, shape)) or "a scalar",
        str(dtype).removeprefix("torch."),
        str(device),
        "trained" if requires_grad else "frozen",
        f"strides {stride}",
        *map(str, inside),
    )


def _changed_value(signature: ModuleSignature, paths: Mapping[int, str], name: str) -> str:
    for entry in signature.entries:
        path = paths.get(id(entry.module), "")
        own = name.removeprefix(f"{path}." if path else "")
        before, now = entry.attributes.get(own), entry.module.__dict__.get(own)
        is_own = f"{path}.{own}" == name if path else own == name
        if is_own and now is not before and {type(before), type(now)} <= {*_SHOWN}:
            return f"'{name}' of the module: {_shown(now)}, planned {_shown(before)}"
    return f"'{name}' of the module, or something in it"
