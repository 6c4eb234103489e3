"""Watch: does the plan of a module run when its parameters are trained?

takes: a planned module. guarantees: one warning for each module, if gradients arrive at its
parameters in a backward pass in which its plan has no part, although the module was used: its
forward was replaced, or its methods and submodules were used without calling it. Nothing else
changes: the hooks that see gradients arrive, on a few parameters, only read the number of the
backward pass, and planning does not count them (`runtime.hooks`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

_SAMPLE = 4
"""Parameters that are always watched: a hook takes about 1 us in each backward pass; on all 16
parameters of eight small layers that was 4 % of a step of 0.5 ms."""

_RECENT = 64
"""Backward passes that can run at once and are told apart; no program runs more."""

_task_now: Callable[[], int] = torch._C._current_graph_task_id

_with_plans = [-1] * _RECENT


def plan_runs() -> None:
    """Note that a plan takes part in the backward pass of this thread."""
    task: int = _task_now()
    _with_plans[task % _RECENT] = task


def _has_plan(task: int) -> bool:
    return _with_plans[task % _RECENT] == task


class Watch:
    """What a planned module was used for since its plan ran last; also the hook on its parameters.

    A backward pass without a plan is right if the original was to run (`original_runs`), or if
    something else than the module uses its parameters: a penalty on weights, another module that
    shares them, the original. So it counts at once only if the forward is not the planned one, or
    if parts of the module were asked for (`used`); else if there are two in a row that bring
    gradients to most parameters, with a step of the optimizer between them.
    """

    __slots__ = (
        "_arrived",
        "_count",
        "_extra",
        "_inside",
        "_is_excused",
        "_has_warned",
        "_module",
        "_task",
        "_used",
        "_versions",
        "_with_eval",
    )

    def __init__(self) -> None:
        self._module: weakref.ref[nn.Module] | None = None
        self._with_eval = False
        self._task = -1
        self._arrived = 0
        self._count = 0
        self._extra: list[RemovableHandle] = []
        self._inside = 0
        self._used: dict[str, None] = {}
        self._versions: dict[int, int] = {}
        self._is_excused = False
        self._has_warned = False

    def __deepcopy__(self, memo: object) -> Watch:
        return Watch()

    def begin(self, module: nn.Module) -> None:
        """Put the hook on up to `_SAMPLE` of the trained parameters that `module` has now, spread
        over all of them, besides those that have it already."""
        if self._module is None:
            self._with_eval = not module.training
        self._module = weakref.ref(module)
        if not self._has_warned:
            trained = _trained(module.parameters())
            last = max(_SAMPLE - 1, 1)
            some = {i * (len(trained) - 1) // last for i in range(_SAMPLE)} if trained else set()
            self._count = len(some)
            self._hook(trained[i] for i in sorted(some))

    def end(self) -> None:
        """Stop: the module is no longer a planned one."""
        self._module = None

    def _hook(self, parameters: Iterable[torch.Tensor]) -> list[RemovableHandle]:
        new = [p for p in parameters if not self._is_on(p)]
        return [p.register_post_accumulate_grad_hook(self) for p in new]

    def _is_on(self, parameter: torch.Tensor) -> bool:
        hooks = parameter._post_accumulate_grad_hooks
        return bool(hooks) and any(hook is self for hook in hooks.values())

    def used(self, name: str, part: nn.Module | nn.Parameter) -> None:
        """Note that the part `name` of the module was asked for: by a method, or by a caller who
        uses it alone. All parameters of the part are watched until a plan runs."""
        if (
            torch.is_grad_enabled()
            and not (self._inside or self._has_warned)
            and _task_now() < 0
            and not torch._C._len_torch_dispatch_stack()  # nobody captures it
        ):
            if name not in self._used:
                own = part.parameters() if isinstance(part, nn.Module) else (part,)
                self._extra += self._hook(_trained(own))
            self._used[name] = None

    def called(self) -> None:
        """Note that a call of the module runs a plan."""
        if self._used:
            self._used.clear()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """While active, `used` notes nothing: a capture, or a forward, uses parts of its module."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @contextlib.contextmanager
    def original_runs(self) -> Iterator[None]:
        """While active, the original runs, as it should: its backward pass gives no warning."""
        with self.aside():
            yield
        if torch.is_grad_enabled():
            self._is_excused = True
            self._used.clear()

    def __call__(self, parameter: torch.Tensor) -> None:
        """Note that a gradient has arrived at `parameter`. As the hook it is called by autograd, in
        each backward pass; at the first gradient of a pass it arranges for `_end` to be called."""
        task: int = _task_now()
        if task == self._task:
            self._arrived += 1
            return
        if torch.compiler.is_compiling():  # a backward pass of compiled autograd: none of a plan
            return
        self._task, self._arrived = task, 1
        if self._has_warned or self._module is None or self._module() is None:
            self._leave(parameter)
            self._task = -1
        elif _has_plan(task):
            self._settle()
        else:  # a plan may yet run
            end = functools.partial(self._end, task, parameter)
            engine: Any = Variable._execution_engine
            engine.queue_callback(end)

    def _settle(self) -> None:
        self._used.clear()
        self._versions.clear()
        self._is_excused = False
        if self._extra:
            for handle in self._extra:
                handle.remove()
            self._extra.clear()

    def _leave(self, parameter: torch.Tensor) -> None:
        hooks = parameter._post_accumulate_grad_hooks or {}
        for key in [key for key, hook in hooks.items() if hook is self]:
            del hooks[key]

    def _end(self, task: int, parameter: torch.Tensor) -> None:
        """End the backward pass with number `task`, whose first gradient arrived at `parameter`;
        warn if it trained the module without its plan."""
        module = None if self._module is None else self._module()
        if _has_plan(task):
            self._settle()
        elif module is not None and not self._is_excused and (module.training or self._with_eval):
            before = self._versions.get(id(parameter), parameter._version)
            self._versions[id(parameter)] = parameter._version
            is_trained = before != parameter._version and 2 * self._arrived > self._count + len(
                self._extra
            )
            used = [*self._used]
            if "forward" in module.__dict__ or used or is_trained:
                self._has_warned = True
                _warn(module, parameter, used)
        self._used.clear()


def _trained(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p for p in parameters if p.requires_grad and p.is_leaf]


def _warn(module: nn.Module, parameter: torch.Tensor, used: list[str]) -> None:
    """Warn that the module is trained without its plan, with the cause and what to do. used: names
    of parts that were used alone."""
    name = next((n for n, p in module.named_parameters() if p is parameter), "a parameter")
    kind = type(module).__qualname__
    if "forward" in module.__dict__:
        cause = (
            f"its forward was replaced after planning{_by(module.__dict__['forward'])}, and the "
            "new one does not call the planned one"
        )
        remedy = (
            "Replace the forward of the original first and plan the module then (for a trainer "
            "that replaces it: plan the module inside, whose forward stays), or have the new "
            "forward call the one that it replaces"
        )
    elif used:
        parts = ", ".join(f"'{part}'" for part in used[:3]) + (", ..." if used[3:] else "")
        cause = f"parts of it ({parts}) were used without calling the module, by a method or alone"
        remedy = (
            "A plan is what a call of the module runs. Plan what is called (rockplan.solve on that "
            "submodule), or a module of your own whose forward makes these calls"
        )
    else:
        cause = "its parameters are trained step after step without calling it"
        remedy = (
            "A plan is what a call of the planned module runs, not of the original or of parts "
            "of either. Train with what rockplan.solve returned, or plan what is called"
        )
    warnings.warn(
        f"a planned {kind} is trained without its plan: a gradient arrived at '{name}' in a "
        f"backward pass in which no plan ran, since {cause}. Such steps run as in eager, with "
        f"eager's memory. {remedy}. This is said once",
        stacklevel=_level_of_user(),
    )


def _by(function: Any) -> str:
    """Return " (by NAME at FILE:LINE)" for the code of a function, looking through partials and
    methods (its own name may be that of a function that it wraps); '' if unknown."""
    while (inner := getattr(function, "func", getattr(function, "__func__", None))) is not None:
        function = inner
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f" (by {code.co_qualname} at {code.co_filename}:{code.co_firstlineno})"


def _level_of_user() -> int:
    """Return the `stacklevel` by which a warning names the innermost frame that is neither ours nor
    PyTorch's; 2 if there is none."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("torch", "rockplan"):
            return level
        level, frame = level + 1, frame.f_back
    return 2
