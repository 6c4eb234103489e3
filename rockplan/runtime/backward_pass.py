"""PlannedCall: one call of a planned module, from its forward to its last backward.

What the forward keeps (`SavedForBackward`) is referred to by a tensor that autograd saves, and by
nothing else. So it is freed when autograd frees saved tensors: after the backward pass, or by an
activation checkpoint around the module, which then supplies what a second forward kept.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from rockplan.codegen import rng_replay
from rockplan.codegen.executable import Executable, Frame, Pattern, run_forward, run_slices
from rockplan.codegen.result_aliasing import Returned, counter_of
from rockplan.errors import BackwardError
from rockplan.python_state.distributed import distributed, local_of, strides_of, waited

Replan = Callable[[Pattern, Sequence[torch.Tensor]], Executable]
"""Returns the plan of the same call, with these residents, for incoming gradients of another
pattern."""


class PlannedCall:
    """One call; several can be in flight.

    executable: its plan; returned: its results, to check what the caller does to them. What the
    forward keeps belongs to autograd's graph (`SavedForBackward`); what a backward pass needs is
    dropped when that pass is over.
    """

    returned: Returned

    def __init__(self, executable: Executable) -> None:
        self.executable = executable
        self._backward: _Backward | None = None
        self._next = 0

    def begin_backward(
        self, kept: SavedForBackward, gradients: tuple[torch.Tensor | None, ...]
    ) -> None:
        """Take in the incoming gradients of the outputs, None where there is none.

        Raises BackwardError if a tensor that the backward pass needs was modified since the
        forward, or if the default dtype, and so dtypes of results, would be others.
        """
        gradients = tuple(map(waited, gradients))
        running, frame = kept.begin_backward(self.executable, gradients)
        self._backward, self._next = _Backward(self.executable, running, frame, kept), 0

    def gradients(self, run: range) -> Sequence[torch.Tensor | None]:
        """Return the gradients that a run of backward slices of the plan hands to autograd, one for
        each of their targets; None where there is none. Frees the state of the pass after the last
        slice. Raises BackwardError if this backward pass did not start at the results."""
        if self._backward is None or run.start != self._next:
            raise BackwardError(_FROM_INSIDE)
        self._next = run.stop
        gradients = self._backward.gradients(run)
        if run.stop == len(self.executable.targets):
            self._backward = None
        return gradients


class SavedForBackward:
    """What the forward of a call keeps for its backward passes.

    A first backward whose incoming gradients have the pattern of the plan continues from what its
    forward saved. Any other (a second one through a retained graph, gradients of other outputs or
    in other strides) runs a forward again, from the generator states of the first one and without
    changing buffers (on copies of buffers that it reads and changes), by the same plan or by the
    one that `replan` returns. So it is bit for bit what eager does, and takes the time of one more
    forward.
    """

    def __init__(
        self,
        executable: Executable,
        residents: tuple[torch.Tensor, ...],
        wrappers: Mapping[int, torch.Tensor],
        replan: Replan,
    ) -> None:
        self._wrappers = {**wrappers, **{i: residents[i] for i in executable.distributed}}
        self.residents = tuple(map(local_of, residents)) if executable.distributed else residents
        self._executable = executable
        self._replan = replan
        self._frame = Frame(self.residents, executable.sizes)
        self._is_used = False
        self._default_dtype = torch.get_default_dtype()

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Run the forward phase; return the results. Keeps states of generators and version
        counters, by which a backward pass knows what has changed."""
        executable = self._executable
        self._starts = rng_replay.starts(executable.devices) if executable.random else ()
        outputs = run_forward(executable, self._frame)
        self._copies = dict(zip(executable.code.copied, self._frame.copies, strict=True))
        self._versions = self._versions_at(range(len(self.residents)))
        self._storages = _storages(self.residents)
        self._saved_versions = _versions(self._frame.saved.values())
        for position, _ in executable.code.inputs:
            self._put(position, counter_of(self.residents[position]))
        return outputs

    def _put(self, position: int, resident: torch.Tensor) -> None:
        """In place of an input, which the frame holds or has on the host, or back."""
        residents = [*self.residents]
        residents[position] = resident
        self._frame.residents = self.residents = tuple(residents)
        self._versions[position] = resident._version
        self._storages[position] = resident.untyped_storage()

    def _take_inputs_back(self) -> None:
        """Have all inputs for a forward that runs again. Raises BackwardError if one was
        modified."""
        for position, name in self._executable.code.inputs:
            if self.residents[position].numel():
                continue
            self.check_residents([position], _MODIFIED)
            tensor = self._frame.saved.get(name)
            if tensor is None:
                (tensor,) = self._frame.page_in(name)
                self._frame.paged_in(name)
            self._put(position, tensor)

    @property
    def is_needed(self) -> bool:
        """True if the planned backward pass reads anything that the forward kept."""
        frame = self._frame
        return bool(frame.saved) or frame.has_pages or any(self._executable.code.read)

    def begin_backward(
        self, planned: Executable, gradients: tuple[torch.Tensor | None, ...]
    ) -> tuple[Executable, Frame]:
        """Return (the plan whose slices are to run, the frame that they run in, with the incoming
        gradients). It runs a second forward if this is not the first backward, or the gradients
        have another pattern. planned: the plan of the call; gradients: one for each result, or
        None.

        Raises BackwardError as `PlannedCall.begin_backward`.
        """
        if torch.get_default_dtype() != self._default_dtype:
            raise BackwardError(
                f"the default dtype was {self._default_dtype} in the forward pass, and what runs "
                f"again would be computed in {torch.get_default_dtype()}; call backward under the "
                "same (torch.set_default_dtype)"
            )
        pattern = tuple(None if g is None else strides_of(g) for g in gradients)
        is_again = self._is_used or pattern != self._executable.pattern
        if is_again or torch._C._autograd._get_current_graph_task_keep_graph():
            self._take_inputs_back()
        if is_again:
            running, frame = self._forward_again(planned, pattern)
        else:
            running, frame = self._executable, self._frame
            if self._saved_versions != _versions(frame.saved.values()):
                raise BackwardError(_MODIFIED)
            self.check_residents(running.code.checked, _MODIFIED)
        self._is_used = True
        frame.put_tangents(tuple(local_of(g) for g in gradients if g is not None))
        return running, frame

    def _forward_again(self, planned: Executable, pattern: Pattern) -> tuple[Executable, Frame]:
        """planned: the plan of the call. Raises BackwardError if eager would do something else."""
        # Saved results of operators that may act outside of the step (exchange data, count), unless
        # they were modified.
        saved = {} if self._is_used else self._frame.saved
        is_as_it_was = bool(saved) and self._saved_versions == _versions(saved.values())
        acting = self._executable.code.acting
        kept = tuple(saved.get(name) if is_as_it_was else None for _, name in acting)
        # The rest of what the forward kept is freed: another forward runs.
        self._is_used, self._frame = True, Frame(self.residents)
        is_own = pattern == self._executable.pattern
        running = (self._executable if is_own else self._replan(pattern, self.residents)).again()
        if not _counts(running).keys() <= _counts(planned).keys():
            raise BackwardError(
                "this backward pass starts from other outputs of the module than the plan knows, "
                "and reaches parameters or inputs that it did not reach before; name all leaves "
                "of the result that are ever differentiated: Options(differentiated=(0, 1, ...))"
            )
        if not self._copies.keys() >= set(running.code.copied):
            raise BackwardError(
                "this backward pass starts from other outputs of the module than the plan knows, "
                "and needs buffers as they were before the forward, of which no copy was made; "
                "name the leaves that are differentiated: Options(differentiated=(0, 1, ...))"
            )
        if running.random and not self._starts:
            raise BackwardError(
                "a backward pass other than the planned one runs the forward again from the same "
                "state of the generators, which a CUDA graph cannot capture; capture one backward "
                "pass, from the outputs and in the strides of the plan"
            )
        self.check_residents(running.code.checked, _MODIFIED)
        frame = Frame(self._as_before(running.code.copied), running.sizes)
        first, second = ([op for op, _ in e.code.acting] for e in (self._executable, running))
        missing = [second[i] for i in running.code.reused if first != second or kept[i] is None]
        if missing:
            raise BackwardError(_ACTS.format(op=missing[0]))
        frame.first = kept
        with rng_replay.restarted(self._starts):
            run_forward(running, frame)
        frame.residents = self.residents  # eager's backward pass reads these, not the copies
        return running, frame

    def _as_before(self, positions: Iterable[int]) -> tuple[torch.Tensor, ...]:
        residents = list(self.residents)
        for position in positions:
            before, residents[position] = self._copies[position].unbind()
            residents[position].copy_(before)
        return tuple(residents)

    def check_residents(self, positions: Sequence[int], message: str) -> None:
        """Raise BackwardError with `message` if a resident at one of `positions` was written to, or
        given other memory, since the forward."""
        tensors = [self.residents[i] for i in positions]
        if self._versions_at(positions) != [self._versions[i] for i in positions]:
            raise BackwardError(message)
        # `tensor.data = ...` counts no version.
        storages = [self._storages[i] for i in positions]
        if not all(map(operator.is_, _storages(tensors), storages)):
            raise BackwardError(message)

    def _versions_at(self, positions: Sequence[int]) -> list[int]:
        """Writes to a tensor and to the wrapper that it is inside of count apart; here they are
        added."""
        versions = _versions([self.residents[i] for i in positions])
        if not self._wrappers:
            return versions
        wrappers = [self._wrappers.get(i, _UNCHANGED) for i in positions]
        return [*map(operator.add, versions, _versions(wrappers))]


class _Backward:
    """One backward pass. It runs the slices of the plan `running`, and returns gradients by the
    slices of the plan of the call (`planned`)."""

    def __init__(
        self, planned: Executable, running: Executable, frame: Frame, kept: SavedForBackward
    ) -> None:
        self._planned = planned
        self._running = running
        self._frame = frame
        self._kept = kept
        self._next_slice = 0
        self._waiting: dict[int, list[torch.Tensor]] = defaultdict(list)

    def gradients(self, run: range) -> Sequence[torch.Tensor | None]:
        if self._running.targets == self._planned.targets:
            return self._run_slices(run)
        return [gradient for number in run for gradient in self._from_other_plan(number)]

    def _run_slices(self, run: range) -> list[torch.Tensor]:
        self._next_slice = run.stop
        read = itertools.chain(*self._running.code.read[run.start : run.stop])
        self._kept.check_residents([*dict.fromkeys(read)], _MODIFIED_BETWEEN)
        gradients = run_slices(self._running, self._frame, run)
        if not self._running.specs:
            return gradients
        specs = itertools.chain(*self._running.specs[run.start : run.stop])
        return [
            g if s is None else distributed(g, s) for g, s in zip(gradients, specs, strict=True)
        ]

    def _from_other_plan(self, number: int) -> tuple[torch.Tensor | None, ...]:
        """None where none is left. Autograd adds up what it is handed for a parameter, in order: if
        the other plan hands over more contributions than the plan of the call has places for, the
        first place gets the sum of the first ones, in eager's order."""
        places, made = _counts(self._planned), _counts(self._running)
        taken = {t for targets in self._planned.targets[:number] for t in targets}
        gradients: list[torch.Tensor | None] = []
        for target in self._planned.targets[number]:
            more = 0 if target in taken else max(made[target] - places[target], 0)
            gradients.append(self._contribution(target, 1 + more))
            taken.add(target)
        if number + 1 == len(self._planned.targets):
            self._run_until(lambda: False)
        return tuple(gradients)

    def _contribution(self, target: int, count: int) -> torch.Tensor | None:
        """The sum of the next `count`, or of what is left; None without any."""
        waiting = self._waiting[target]
        self._run_until(lambda: len(waiting) >= count, target)
        taken = waiting[:count]
        del waiting[:count]
        return functools.reduce(torch.add, taken) if taken else None

    def _run_until(self, done: Callable[[], bool], target: int | None = None) -> None:
        """Or until no remaining slice makes a gradient of `target` (None: until none remains)."""
        left = self._running.targets
        while not done() and any(
            target is None or target in targets for targets in left[self._next_slice :]
        ):
            number = self._next_slice
            for made, gradient in zip(
                left[number], self._run_slices(range(number, number + 1)), strict=True
            ):
                self._waiting[made].append(gradient)


def _counts(executable: Executable) -> Counter[int]:
    return Counter(t for targets in executable.targets for t in targets)


def _versions(tensors: Collection[torch.Tensor]) -> list[int]:
    """Return the version counters of tensors; -1 for inference tensors, which have none."""
    try:
        return [*map(_VERSION, tensors)]
    except RuntimeError:  # inference tensors have none
        return [-1 if t.is_inference() else t._version for t in tensors]


def _storages(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage | None]:
    """The same object for the same storage, as long as something holds it."""
    try:
        return [*map(torch.Tensor.untyped_storage, tensors)]
    except (RuntimeError, NotImplementedError):  # some layouts have none
        return [t.untyped_storage() if t.layout is torch.strided else None for t in tensors]


_UNCHANGED = torch.empty(0)
_VERSION = operator.attrgetter("_version")


_FROM_INSIDE = (
    "a backward pass begins inside of a planned module, which computes gradients of inputs and of "
    "parameters in one pass from its results. Schedules of pipelines with zero bubble "
    "(ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV) ask for them apart: "
    "use 1F1B (Schedule1F1B, ScheduleInterleaved1F1B)"
)

_MODIFIED = (
    "a parameter, input or output that the backward pass needs was modified in place, or given "
    "other memory (`tensor.data = ...`), after the forward pass (for example by optimizer.step() "
    "before backward, or by moving the module); "
    "gradients would be wrong. Call backward first, or clone the tensor"
)

_ACTS = (
    "a second backward pass, or one from other outputs or in other strides than planned, needs "
    "the forward again, and {op} is never called twice: it may act outside of the step (exchange "
    "data, count, raise). Return the loss from the module, plan for its gradients "
    "(rockplan.solve(..., loss=lambda y: y.sum())), or say that the operator does "
    "nothing beside its results: rockplan.pure('library::name') before planning"
)

_MODIFIED_BETWEEN = (
    "a parameter, buffer or input was modified in place, or given other memory, during the "
    "backward pass (by a hook), "
    "which still needs it; gradients would be wrong. Have each parameter changed by a hook on "
    "itself (register_hook or register_post_accumulate_grad_hook) that is there before the "
    "forward: then its gradient waits until nothing else needs the parameter, if the budget has "
    "room for that; or pass a larger budget"
)
