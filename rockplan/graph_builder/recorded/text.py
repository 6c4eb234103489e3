"""The text of a recorded run: a Python-like line for each call.

takes: a Capture. returns: text. Names of parameters and buffers are those of the module; other
values are numbered as recorded.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch._prims_common import make_contiguous_strides_for

from rockplan.graph_builder.recorded.run import Capture, RecordedCall
from rockplan.values.graph import Phase, TensorSpec, ValueRef, stem

_INDENT = "    "


def run_text(run: Capture) -> str:
    """Return a signature of the run's inputs, its calls by phase, and its gradients and results."""
    return "\n".join(_Text(run).lines())


def tensor_text(spec: TensorSpec) -> str:
    """Return 'float32[4, 8]'; with strides unless contiguous: 'float32[4, 8; 1, 4]'."""
    sizes = ", ".join(map(str, spec.shape))
    if spec.stride != make_contiguous_strides_for(spec.shape):
        sizes += f"; {', '.join(map(str, spec.stride))}"
    place = "" if spec.device == "cpu" else f" on {spec.device}"
    return f"{spec.dtype.removeprefix('torch.')}[{sizes}]{place}"


class _Text:
    """One run as lines."""

    def __init__(self, run: Capture) -> None:
        self._run = run
        self._names = {value: name for name, value in (*run.parameters, *run.buffers)}
        self._names |= {value: f"input_{position}" for position, value in run.inputs}
        self._names |= {v: f"constant_{n}" for n, (v, _) in enumerate(run.constants)}
        # Storage -> its first value, which later values in it are views of.
        self._first: dict[int, int] = {}

    def lines(self) -> Iterator[str]:
        run = self._run
        signature = ", ".join(map(self._typed, self._names))
        for value in self._names:
            self._first.setdefault(run.values[value].storage, value)
        yield f"def run({signature}):"
        yield from self._phase(Phase.FORWARD)
        tangents = [o.tangent for o in run.outputs if o.tangent is not None]
        if tangents:
            yield f"{_INDENT}# backward from {', '.join(map(self._typed, tangents))}"
        for value in tangents:
            self._first.setdefault(run.values[value].storage, value)
        yield from self._phase(Phase.BACKWARD)
        for target, gradient in run.gradients:
            shown = "None" if gradient is None else self._name(gradient)
            yield f"{_INDENT}{self._name(target)}.grad = {shown}"
        results = (repr(o.literal) if o.value is None else self._name(o.value) for o in run.outputs)
        yield f"{_INDENT}return {', '.join(results)}"

    def _phase(self, phase: Phase) -> Iterator[str]:
        place = ""
        for recorded in self._run.calls:
            if recorded.phase is not phase:
                continue
            here = f"# {recorded.module or '(root)'}  {recorded.source}".rstrip()
            if here != place:
                yield _INDENT + here
                place = here
            yield _INDENT + self._call(recorded)

    def _call(self, recorded: RecordedCall) -> str:
        call = recorded.call
        made = call.made
        arguments = [self._argument(a) for a in call.args]
        arguments += [f"{name}={self._argument(a)}" for name, a in call.kwargs]
        results = ", ".join("_" if r is None else self._typed(r) for r in call.results)
        storages = ((v, self._run.values[v].storage) for v in made)
        bases = ((v, self._first.setdefault(storage, v)) for v, storage in storages)
        remarks = [
            f"writes {', '.join(map(self._name, recorded.writes))}" if recorded.writes else "",
            "draws" if recorded.random else "",
            *(f"in {self._name(base)}" for v, base in bases if base != v),
        ]
        shown = "; ".join(filter(None, remarks))
        equals = f"{results} = " if results else ""
        remark = f"  # {shown}" if shown else ""
        op = stem(call.op).removesuffix(".default")
        return f"{equals}{op}({', '.join(arguments)}){remark}"

    def _argument(self, argument: object) -> str:
        if isinstance(argument, ValueRef):
            return self._name(argument.index)
        if isinstance(argument, tuple):
            items = ", ".join(map(self._argument, argument))
            return f"({items},)" if len(argument) == 1 else f"({items})"
        return repr(argument)

    def _typed(self, value: int) -> str:
        return f"{self._name(value)}: {tensor_text(self._run.values[value].spec)}"

    def _name(self, value: int) -> str:
        return self._names.get(value, f"v{value}")
