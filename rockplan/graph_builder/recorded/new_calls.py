"""NewCalls: calls that a pass writes into a run, computed on fake tensors.

takes: the view of a run. returns: its values and new ones, calls. guarantees: results of new calls
have the specs that eager gives them; values that share a storage are fake tensors that share one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.symbols import known_number
from rockplan.graph_builder.recorded.evaluate import flat_results, substitute
from rockplan.graph_builder.recorded.results import Results
from rockplan.graph_builder.recorded.run import RecordedCall, RecordedValue, RunView, tensor_spec
from rockplan.graph_builder.recorded.specs import new_storage, tensor_in
from rockplan.values.graph import Call, refs


class NewCalls:
    """values: those of the run, then new ones; calls: written so far, in order."""

    def __init__(self, view: RunView) -> None:
        self.values = list(view.values)
        self.calls: list[RecordedCall] = []
        self._results = Results(FakeTensorMode())
        self._fakes: dict[int, torch.Tensor] = {}
        self._memory: dict[int, torch.UntypedStorage] = {}
        self._ordinals: dict[int, int] = {}
        self._next_storage = view.next_storage

    def add(
        self,
        like: RecordedCall,
        op: str,
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...] = (),
    ) -> tuple[int, ...]:
        """Append a call with the module and source line of `like`; return the values of its
        results, which are new. Raises what the operator raises."""
        results = tuple(map(self._value, flat_results(self.made(Call(op, args, kwargs, ())))))
        self.write(like, Call(op, args, kwargs, results))
        return results

    def write(self, like: RecordedCall, call: Call) -> None:
        """Write a call whose results are known."""
        reads = tuple(dict.fromkeys(r.index for r in refs(call)))
        self.calls.append(replace(like, call=call, reads=reads, writes=()))

    def made(self, call: Call) -> Any:
        """Return the results of the call as fake tensors. Raises what the operator raises."""
        args = tuple(substitute(a, self._fake) for a in call.args)
        kwargs = {name: substitute(a, self._fake) for name, a in call.kwargs}
        with torch.no_grad(), torch._C._DisableAutocast(), self._results.fake_mode:
            return self._results.of(facts.resolve(call.op), args, kwargs)

    def _value(self, tensor: Any) -> int:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError("a call makes what is no tensor")
        storage = tensor.untyped_storage()
        ordinal = self._ordinals.get(storage._cdata)
        if ordinal is None:
            ordinal = self._ordinals[storage._cdata] = self._next_storage
            self._memory[ordinal] = storage
            self._next_storage += 1
        number = len(self.values)
        self.values.append(
            RecordedValue(tensor_spec(tensor), ordinal, known_number(storage.nbytes()))
        )
        self._fakes[number] = tensor
        return number

    def _fake(self, value: int) -> torch.Tensor:
        if value not in self._fakes:
            recorded = self.values[value]
            with self._results.fake_mode:
                if recorded.storage not in self._memory:
                    storage = new_storage(recorded.storage_bytes, recorded.spec.device)
                    self._memory[recorded.storage] = storage
                    self._ordinals[storage._cdata] = recorded.storage
                self._fakes[value] = tensor_in(self._memory[recorded.storage], recorded.spec)
        return self._fakes[value]
