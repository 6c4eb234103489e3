"""Agreement: processes that plan the same graph, one of which decides for all.

takes: the ranks that plan together; a function that plans. returns: the plan of one of them.
guarantees: an error of one process is raised on all, with its rank; nobody waits for a silent
process longer than the default store allows, also in a group with a timeout of its own, and the
error names who answered. (That is the timeout of init_process_group, by default 10 minutes with
NCCL and 30 with others; a process that plans for longer answers too late.)

Messages go through the store by which the processes met: that needs no device memory, and shows who
has answered. Processes with another graph decide among themselves, unless collectives with one of
these may run again: as often on each, so that it has to be by one plan.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from rockplan.errors import InvalidInput, OtherRankFailed, RockplanError
from rockplan.graph_builder.operators.facts import facts_of
from rockplan.graph_builder.operators.rows import Effect
from rockplan.python_state.distributed import has_others, is_distributed
from rockplan.values.graph import CDGraph, MeshGroup

_LOGGER = logging.getLogger("rockplan")
T = TypeVar("T")

_DONE = "done"
"""The message of a process that has planned, in place of a key."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error, in a form that can be sent to other processes. kind: its class, if it is ours, else
    OtherRankFailed; facts: its attributes."""

    kind: type[RockplanError]
    text: str
    facts: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException, rank: int) -> _Failure:
        """An error that is not rockplan's is sent as OtherRankFailed."""
        text = f"rank {rank} could not plan: "
        if not isinstance(error, RockplanError):
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return cls(OtherRankFailed, f"{text}{said}", {})
        facts = {k: v for k, v in vars(error).items() if not k.startswith("__") and _is_sent(v)}
        return cls(type(error), f"{text}{error}", facts)

    def error(self) -> RockplanError:
        error = self.kind.__new__(self.kind)
        error.args = (self.text,)
        vars(error).update(self.facts)
        return error


def _is_sent(value: object) -> bool:
    """True if pickle can send the value (it may raise any error for one that it cannot)."""
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


class Agreement:
    """The agreement of `ranks`, this rank among them, during one call of the public interface.
    store: where messages are posted; None: there is nobody to agree with."""

    def __init__(self, rank: int, ranks: tuple[int, ...] = (), store: Any = None):
        self._rank = rank
        self._ranks = ranks
        self._store = store
        self._step = 0
        self._done: set[int] = set()
        self._decided: list[str] = []
        self._failure: _Failure | None = None
        self._is_split = False

    def decided(
        self, key: Callable[[], object], make: Callable[[], T], graphs: Iterable[CDGraph] = ()
    ) -> T:
        """Return what `make` returns on the lowest rank whose `key` is equal to ours, or raise the
        error that it raises there. `make` runs on that rank only. key, and the result of `make`,
        can be pickled. graphs: that are planned. Raises InvalidInput if collectives may run again
        with ranks that have another key."""
        if self._store is None:
            refuse_apart(graphs)
            return make()
        ranks = [*self.gathered(key(), None)]
        refuse_apart(graphs, ranks)
        leader = min(ranks)
        place = f"{self._step} of {leader}"
        if leader != self._rank:
            found: T = self._awaited({leader: place})[leader]
            return found
        self._decided.append(place)
        try:
            made = make()
            self._post(place, made)
        except BaseException as error:  # others wait for this message, even if we are interrupted
            self._failure = _Failure.of(error, self._rank)
            with contextlib.suppress(Exception):  # the user is to see `error`
                self._post(place, self._failure)
            if not isinstance(error, Exception):
                raise
            raise self._failure.error() from error
        return made

    def gathered(self, key: object, value: T) -> dict[int, T]:
        """Return rank -> `value` there, for this rank and all others that gave an equal key; waits
        for all. Warns once if others have another key."""
        if self._store is None:
            return {self._rank: value}
        found = self._received(self._send((key, value)))
        answers = {r: message for r, message in found.items() if message != _DONE}
        alike = {r: v for r, (other, v) in answers.items() if other == key}
        if len(alike) < len(answers) and not self._is_split:
            self._is_split = True
            _LOGGER.warning(
                "rank %d plans another model, batch size or budget, or its part of a DTensor by "
                "other operations, than ranks %s: ranks that plan the same have a plan of their "
                "own",
                self._rank,
                ", ".join(str(r) for r in answers if r not in alike),
            )
        return {self._rank: value, **alike}

    def told(self, error: BaseException) -> _Failure | None:
        """Return the failure of another process that has ended this one by `error`: of a collective
        in a step, in which that process does not take part any more. None if none has told of
        one."""
        if self._store is None or isinstance(error, RockplanError):
            return None
        for rank in self._ranks:
            place = f"{self._step} by {rank}"
            with contextlib.suppress(OtherRankFailed):  # the user is to see `error`
                if rank != self._rank and self._has(place):
                    message = pickle.loads(self._store.get(place))
                    if isinstance(message, _Failure):
                        self._failure = message
                        return message
        return None

    def fail(self, error: BaseException) -> None:
        """Tell all other processes of the error, so that nobody waits for this one, and wait until
        they have read it, at most _LEAVING_S. The message of an error of rockplan gets the rank."""
        if self._store is not None:
            failure = self._failure or _Failure.of(error, self._rank)
            if self._failure is None and isinstance(error, RockplanError):
                error.args = (failure.text, *error.args[1:])
            with contextlib.suppress(Exception):  # the user is to see `error`
                self._send(failure)
                self._post(f"left by {self._rank}", _DONE)
                # The process may end, and take the store with it.
                until = time.monotonic() + _LEAVING_S
                for rank in (r for r in self._ranks if r not in self._done):
                    while not self._has(f"left by {rank}") and time.monotonic() < until:
                        time.sleep(_LONGEST_PAUSE_S)

    def end(self) -> None:
        """Wait until all processes have planned. An error of one that is later is raised here."""
        if self._store is None:
            return
        step = self._send(_DONE)
        while self._done < {r for r in self._ranks if r != self._rank}:
            self._received(step)
            step += 1
        # Messages of steps stay, a few bytes: slower processes may still read them.
        for place in self._decided:
            with contextlib.suppress(Exception):  # not every store can delete
                self._store.delete_key(place)

    def _send(self, message: object) -> int:
        """Post a message that all others read in this step, and begin the next; return the former
        step."""
        step = self._step
        self._post(f"{step} by {self._rank}", message)
        self._step += 1
        return step

    def _received(self, step: int) -> dict[int, Any]:
        others = [r for r in self._ranks if r != self._rank and r not in self._done]
        found = self._awaited({r: f"{step} by {r}" for r in others})
        self._done |= {r for r, message in found.items() if message == _DONE}
        return found

    def _post(self, place: str, message: object) -> None:
        sent = pickle.dumps(message)
        with _naming_a_lost_store():
            self._store.set(place, sent)

    def _has(self, place: str) -> bool:
        with _naming_a_lost_store():
            return bool(self._store.check([place]))

    def _awaited(self, places: Mapping[int, str]) -> dict[int, Any]:
        """places: rank -> its key in the store. Raises the error that one of them sent;
        OtherRankFailed if one does not answer in time."""
        found: dict[int, Any] = {}
        allowed: datetime.timedelta = self._store.timeout
        began, pause_s = time.monotonic(), 0.001
        while missing := {r: place for r, place in places.items() if r not in found}:
            # No blocking get: a store that waits lets nobody else use its connection.
            for rank, place in missing.items():
                if self._has(place):
                    with _naming_a_lost_store():
                        found[rank] = pickle.loads(self._store.get(place))
                    if isinstance(found[rank], _Failure):
                        self._failure = found[rank]
                        raise self._failure.error()
            if time.monotonic() - began > allowed.total_seconds():
                self._done |= {*missing}  # nobody waits for them again
                raise OtherRankFailed(self._silent([*missing], allowed))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return found

    def _silent(self, missing: list[int], allowed: datetime.timedelta) -> str:
        answered = [r for r in self._ranks if r not in missing]
        return (
            f"ranks {_listed(missing)} did not answer within {allowed.total_seconds():.0f} s while "
            f"all planned together; ranks {_listed(answered)} did. Look for errors of the former, "
            "have all of the group call the same function, equally often, or allow more time "
            "(init_process_group(timeout=...))"
        )


_LONGEST_PAUSE_S = 0.05
_LEAVING_S = 5.0
"""Seconds that a failing process waits for others to notice."""


@contextlib.contextmanager
def _naming_a_lost_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise OtherRankFailed(
            "the store by which processes plan together is gone, with the process that keeps it "
            f"(rank 0, unless torchrun does): {str(error).partition(chr(10))[0]}"
        ) from error


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


ALONE = Agreement(0)
"""The agreement of a process that plans by itself."""

_calls: Counter[tuple[int, ...]] = Counter()
"""Ranks -> how often they have planned together."""


def refuse_apart(graphs: Iterable[CDGraph], alike: Collection[int] = ()) -> None:
    """Raise InvalidInput if collectives of `graphs` may run again with other ranks than those that
    have the same plan (`alike`; (): this one alone), which would not call them as often."""
    if not has_others():
        return
    again = (n for graph in graphs for n in graph.nodes if n.recomputable)
    calls = (c for n in again for c in n.calls if facts_of(c.op).effect is Effect.COMMUNICATES)
    partners = {rank for group in {c.args[-1] for c in calls} for rank in _ranks_in(group)}
    apart = partners - {dist.get_rank(), *alike}
    if apart:
        raise InvalidInput(
            "Options(rerun_collectives=True) needs one plan of all processes that exchange data, "
            f"and ranks {_listed(sorted(apart))} do not make this one with rank "
            f"{dist.get_rank()}. Plan the same model, batch size and budget on all, with Options("
            "group=torch.distributed.group.WORLD), before training, in which calls and backward "
            "passes of other kinds (shapes, strides of gradients) are not planned for; plan the "
            "blocks of a model whose embedding is divided by words, which is another operation on "
            "each process. Or leave out rerun_collectives"
        )


def _ranks_in(group: Any) -> list[int]:
    name = group.name if isinstance(group, MeshGroup) else group
    known: Any = dist.distributed_c10d
    ranks: list[int] = dist.get_process_group_ranks(
        known._resolve_process_group(name) if isinstance(name, str) else name
    )
    return ranks


@contextlib.contextmanager
def agreement(group: dist.ProcessGroup | None, model: nn.Module) -> Iterator[Agreement]:
    """Yield what the processes of `group` agree on in the `with` block; with None, those that share
    the parameters of `model` by DTensors (they call the same functions anyway). An error in the
    block is told to the others. Raises InvalidInput for what is no group, and for several largest
    meshes of parameters."""
    ranks = _ranks_of(group, model)
    if len(ranks) < 2:
        yield ALONE
        return
    _calls[ranks] += 1
    name = f"rockplan {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} {ranks} {_calls[ranks]}"
    distributed: Any = dist
    store = distributed.PrefixStore(name, distributed.distributed_c10d._get_default_store())
    made = Agreement(dist.get_rank(), ranks, store)
    try:
        yield made
    except BaseException as error:
        failure = made.told(error)
        made.fail(error)
        if failure is not None:
            raise failure.error() from error
        raise
    made.end()


def _ranks_of(group: dist.ProcessGroup | None, model: nn.Module) -> tuple[int, ...]:
    """Ascending; with no group those of the largest mesh of the model's DTensors; () if there is
    none. Raises InvalidInput."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InvalidInput(
            f"Options(group=...) is {group!r}; pass a process group that this process is in, such "
            "as torch.distributed.group.WORLD once init_process_group has been called"
        )
    if not has_others():
        return ()
    if group is not None:
        return tuple(sorted(dist.get_process_group_ranks(group)))
    return _largest_of(p.device_mesh for p in model.parameters() if is_distributed(p))  # type: ignore[attr-defined]


def _largest_of(meshes: Iterable[Any]) -> tuple[int, ...]:
    """() without one. Raises InvalidInput if there are several: another process may take another
    one, and nobody would answer."""
    ranks = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in set(meshes)}
    most = max(map(len, ranks), default=0)
    largest = sorted(r for r in ranks if len(r) == most)
    if len(largest) > 1:
        several = " and with ranks ".join(_listed([*r]) for r in largest)
        raise InvalidInput(
            f"parameters of the model are divided with ranks {several}; say which processes plan "
            "together, with all that take part in a step: "
            "Options(group=torch.distributed.group.WORLD)"
        )
    return largest[0] if largest else ()
