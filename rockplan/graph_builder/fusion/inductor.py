"""Inductor: kernels by PyTorch's compiler, C++ on CPU and Triton on CUDA.

takes: Kernels. returns: for each a function of a list of tensors, or the reason why there is none.
guarantees: results of a function have the specs of the kernel, each in a storage of its own. The
only module that uses Inductor; torch 2.11 to 2.15.

`compile_fx_inner` is called below autograd and Dynamo, on static shapes. Sources go to the system's
compilers as soon as they are written, and all are awaited at the end, so that kernels compile in
parallel. Compiled code stays on disk, in Inductor's own cache.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import math
import operator
import re
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import profiler
from torch.utils._python_dispatch import _disable_current_modes

from rockplan.errors import InvalidInput, MissingLibrary
from rockplan.graph_builder import compiler_settings as settings
from rockplan.graph_builder.fusion.indices import filled, trial_inputs
from rockplan.graph_builder.operators import facts
from rockplan.graph_builder.operators.symbols import Symbols
from rockplan.values.graph import Kernel, TensorSpec, ValueRef
from rockplan.values.progress import report
from rockplan.values.sizes import Size, texts_in

Function = Callable[[list[Any]], Sequence[torch.Tensor]]

Waits = list[Callable[[], None]]
"""Functions to call before a kernel may be called: they wait for its compilation."""

STAGE = "compiling kernels"

NEEDS = {
    "cpu": "a C++ compiler that works (g++, or what CXX names)",
    "cuda": "a C compiler (gcc, or what CC names), the headers of Python (Debian, Ubuntu: apt "
    "install python3-dev) and the driver's libcuda.so.1 (in the folder that TRITON_LIBCUDA_PATH "
    "names, if not where libraries lie)",
}
"""What the system must have to compile, by type of device."""

_COMPILING = threading.RLock()
"""Held while compiling, since a method of Inductor's is replaced meanwhile."""


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return operator -> function that computes it by simpler ones, as Inductor needs it."""
    from torch._inductor.decomposition import select_decomp_table

    importlib.import_module("torch._inductor.lowering")  # some decompositions need it imported
    return select_decomp_table()


def check_compiler(device_type: str) -> None:
    """Raise MissingLibrary if there is no compiler for a device of this type, InvalidInput if
    Inductor is not supported there (any type but 'cpu' and 'cuda')."""
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            raise MissingLibrary(
                "Options(compile=True) needs a C++ compiler on CPU, and there is none: install g++ "
                "(Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: "
                "xcode-select --install), or name one in the environment variable CXX"
            ) from error
    elif device_type == "cuda":
        from torch.utils._triton import has_triton_package

        if not has_triton_package():
            raise MissingLibrary(
                "Options(compile=True) needs Triton on CUDA, and it is not installed: "
                "pip install triton"
            )
    else:
        raise InvalidInput(
            f"Options(compile=True) compiles kernels for CPU and CUDA, not for {device_type}; "
            "leave it out there"
        )


def check_roundings(device_type: str, dtypes: Iterable[str]) -> None:
    """Raise InvalidInput where Inductor leaves out eager's roundings to 16 bits in spite of
    `keeps_roundings`: on CPU before torch 2.13. dtypes: those of the run, as 'torch.bfloat16'."""
    is_rounded = any(d in ("torch.bfloat16", "torch.float16") for d in dtypes)
    if device_type == "cpu" and is_rounded and torch.__version__ < "2.13":
        raise InvalidInput(
            f"Options(compile='near') keeps no roundings to 16 bits on CPU with torch "
            f"{torch.__version__}, whose compiler leaves them out: use torch 2.13 or later, or "
            "compile=True"
        )


def compiled(kernels: Sequence[Kernel]) -> dict[str, Function | str]:
    """Compile the kernels, all at once. Return operator of each kernel -> its function of a list of
    tensors, or the reason why there is none."""
    functions: dict[str, Function | str] = {}
    if not kernels:
        return functions
    waits: dict[str, Waits] = {}
    with _COMPILING, below_autograd(), _waiting_later() as pending:
        for done, kernel in enumerate(kernels):
            report(STAGE, done, 2 * len(kernels))
            functions[kernel.op] = _tried(functools.partial(_begun, kernel))
            waits[kernel.op] = [*pending]
            pending.clear()
        for done, kernel in enumerate(kernels):
            report(STAGE, len(kernels) + done, 2 * len(kernels))
            function = functions[kernel.op]
            if not isinstance(function, str):
                functions[kernel.op] = _tried(
                    functools.partial(_finished, kernel, function, waits[kernel.op])
                )
    report(STAGE, 2 * len(kernels), 2 * len(kernels))
    return functions


def _tried(make: Callable[[], Function]) -> Function | str:
    """Return what `make` returns, or the type and first line of the error that it raises. Compilers
    raise errors of any type; operators of a kernel that does not compile run unfused."""
    try:
        return make()
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        return f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Set the state in which generated code runs: no dispatch mode, no gradients, no autocast."""
    with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():
        yield


# -- one kernel --------------------------------------------------------------------------------


GUARDS: dict[str, tuple[str, ...]] = {}
"""Operator of a kernel for several sizes -> expressions that are true of those it is for."""


def _begun(kernel: Kernel) -> Function:
    from torch._inductor import compile_fx, config
    from torch._inductor.utils import BoxedBool

    symbols = Symbols(kernel.sizes)
    # Inductor's cache on disk requires a ShapeEnv, though all shapes may be static.
    fakes = FakeTensorMode(shape_env=symbols.env)
    with fakes:
        inputs = [*symbols.numbers.values(), *map(filled, symbols.symbolic(kernel.inputs))]
    graph = _graph(kernel, inputs, symbols)
    context = tracing(TracingContext(fakes))
    patch = config.patch(settings.settings_for(kernel.keeps_roundings))
    with settings.without_deterministic_algorithms(), patch, context, fakes:
        made = compile_fx.compile_fx_inner(
            graph,
            inputs,
            # Inputs are aligned as promised (`kinds`): calls need not check that, and copy.
            static_input_idxs=range(len(inputs)),
            cudagraphs=BoxedBool(False),
            is_inference=True,
        )
    GUARDS[kernel.op] = symbols.guards
    # Saves the Python frame of `CompiledFxGraph.__call__`, if there is one.
    function: Function = getattr(made, "current_callable", None) or made
    return function


def _graph(kernel: Kernel, inputs: Sequence[Any], symbols: Symbols) -> fx.GraphModule:
    """inputs: values of the symbols, then tensors."""
    graph = fx.Graph()
    given = [graph.placeholder(f"a{position}") for position in range(len(inputs))]
    for node, fake in zip(given, inputs, strict=True):
        node.meta["val"] = fake
    values = dict(enumerate(given[len(kernel.sizes) :]))
    rounded = frozenset(kernel.rounded)
    numbers = _numbers(graph, kernel, given)

    def argument(literal: Any) -> Any:
        if isinstance(literal, ValueRef):
            return values[literal.index]
        if isinstance(literal, Size):
            return numbers[literal.text]
        return [argument(item) for item in literal] if isinstance(literal, tuple) else literal

    for call in kernel.calls:
        overload = facts.resolve(call.op)
        args = tuple(argument(a) for a in call.args)
        kwargs = {name: argument(a) for name, a in call.kwargs}
        node = graph.call_function(overload, args, kwargs)
        # Inductor's mark for results that eager rounds.
        node.meta["low_precision_pointwise_barrier"] = any(r in rounded for r in call.results)
        returns = overload._schema.returns
        is_one = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)
        made = ((r, place) for place, r in enumerate(call.results) if r is not None)
        for result, place in made:
            item = node if is_one else graph.call_function(operator.getitem, (node, place))
            values[result] = item
    new = _new(kernel)
    output = graph.output(tuple(values[kernel.results[place]] for place in new))
    # Fixes the strides of results, which Inductor would otherwise choose.
    output.meta["user_visible_output_idxs"] = tuple(range(len(new)))
    output.meta["original_output_strides"] = [
        symbols.symbolic(kernel.result_specs[p].stride) for p in new
    ]
    return fx.GraphModule({}, graph)


def _numbers(graph: fx.Graph, kernel: Kernel, given: Sequence[fx.Node]) -> dict[str, fx.Node]:
    """Return expression of a literal -> what computes it. Raises what fx raises for a function."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    pairs = zip(kernel.sizes, given, strict=False)
    names = {size.text: fx.Proxy(node, tracer) for size, node in pairs}
    numbers = {text: eval(text, {"math": math}, names).node for text in texts_in(kernel.calls)}
    for node in graph.nodes:
        if "val" not in node.meta:
            operands = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
            node.meta["val"] = node.target(*operands)
    return numbers


def _new(kernel: Kernel) -> list[int]:
    over = dict(kernel.over)
    return [place for place in range(len(kernel.results)) if place not in over]


def _finished(kernel: Kernel, function: Function, waits: Waits) -> Function:
    """Wait for the compilation, run the function and what launches directly on trial inputs. Return
    that, with results in the strides of the kernel's specs. Raises RuntimeError if new results
    share memory with each other or with inputs, or differ from their specs in more than strides of
    dimensions of size 1."""
    for wait in waits:
        wait()
    inputs = trial_inputs(kernel)
    runs = function, _direct(function)
    first, second = (tuple(_whole(run, kernel)([*kernel.sizes, *inputs])) for run in runs)
    new, over = _new(kernel), dict(kernel.over)
    made = {results[place].untyped_storage()._cdata for results in (first, second) for place in new}
    of_inputs = {t.untyped_storage()._cdata for t in inputs}
    if len(made) != 2 * len(new) or made & of_inputs:
        raise RuntimeError("a result shares memory with something else")
    looks = [(tuple(t.shape), t.stride(), t.storage_offset(), str(t.dtype)) for t in first]
    specs = [(spec.shape, spec.stride, 0, spec.dtype) for spec in kernel.result_specs]
    pairs = enumerate(zip(looks, specs, strict=True))
    others = [place for place, (found, wanted) in pairs if found != wanted]
    for place in others:
        if place not in over:
            _check_same_memory(first[place], kernel.result_specs[place])
    if others and kernel.sizes:
        raise RuntimeError("a result has other strides in a dimension of size 1")
    return _whole(runs[1], kernel, others)


def _whole(function: Function, kernel: Kernel, others: Sequence[int] = ()) -> Function:
    """Return a function of all results of the kernel, those that are written over operands among
    them. others: places of results that get the strides of their specs."""
    operands = [len(kernel.sizes) + operand for _, operand in kernel.over]
    order = [*(place for place, _ in kernel.over), *_new(kernel)]
    places = [order.index(place) for place in range(len(order))]
    looks = [(p, kernel.result_specs[p].shape, kernel.result_specs[p].stride) for p in others]
    if not operands and not looks:
        return function

    def whole(arguments: list[Any]) -> list[torch.Tensor]:
        made = [arguments[operand] for operand in operands]
        made += function(arguments)
        results = [made[place] for place in places]
        for place, shape, stride in looks:
            results[place] = results[place].as_strided(shape, stride)
        return results

    return whole


def _check_same_memory(made: torch.Tensor, spec: TensorSpec) -> None:
    def steps(shape: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
        return [(n, s) for n, s in zip(shape, stride, strict=True) if n != 1]

    same = steps(made.shape, made.stride()) == steps(spec.shape, spec.stride)
    if not same or made.storage_offset() or str(made.dtype) != spec.dtype:
        raise RuntimeError(
            f"a result is {tuple(made.shape)} in strides {tuple(made.stride())} of {made.dtype}, "
            f"where {spec.shape} in {spec.stride} of {spec.dtype} was recorded"
        )


# -- launches ----------------------------------------------------------------------------------

_GUARD = re.compile(r"with torch\.cuda\._DeviceGuard\((\d+)\):\n +torch\.cuda\.set_device\(\1\)")
_UNGUARDED = r"""if get_device() != \1 or profiler._is_profiler_enabled:
        return guarded(args)
    else:"""
_HELD_BY_CALLER = re.compile(r" +(args\.clear\(\)|del a\d+)\n")
_LAUNCH = re.compile(r"(\w+)\.run\((.*), stream=(\w+)\)")


def _direct(guarded: Function) -> Function:
    """Return a function that launches what `guarded`, code of Inductor's, launches, for less of the
    host's time: what its launchers pass to the driver is written down. While another device is
    current or a profiler looks, and where this Inductor writes or launches otherwise, it is
    `guarded`."""
    try:
        scope = {**guarded.__globals__, "guarded": guarded, "profiler": profiler}
        scope["get_device"] = torch._C._cuda_getDevice
        text, guards = _GUARD.subn(_UNGUARDED, inspect.getsource(guarded))
        text = _LAUNCH.sub(functools.partial(_launch, scope), _HELD_BY_CALLER.sub("", text))
        exec(text, scope)
    except (AttributeError, OSError, SyntaxError, TypeError, ValueError):
        return guarded
    return scope["call"] if guards == 1 else guarded


class _Written:
    """The text of an argument of a launch, with which nothing can be computed."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _launch(scope: dict[str, Any], match: re.Match[str]) -> str:
    """Return text that passes on what the only launcher of a kernel passes to the driver."""
    name, launch = match[1], f"{match[1]}_launch"
    (launcher,) = scope[name].launchers
    call: Any = ast.parse(match[0], mode="eval").body
    given = [
        a.value if isinstance(a, ast.Constant) else _Written(ast.unparse(a)) for a in call.args
    ]
    passed: list[tuple[Any, ...]] = []
    try:
        kernel = launcher.__globals__["runner"].__self__
        noting = object.__new__(type(kernel))
        note = types.SimpleNamespace(_launch_kernel=lambda *given: passed.append(given))
        vars(noting).update(vars(kernel), C_impl=note)
        known = {**launcher.__globals__, "runner": noting.run}
        types.FunctionType(launcher.__code__, known)(*given, stream=_Written(match[3]))
        scope[launch] = kernel.C_impl._launch_kernel
    except (AttributeError, TypeError):  # Triton's own launcher, or a grid of sizes
        scope[launch] = launcher
        return match[0].replace(f"{name}.run(", f"{launch}(")
    return f"{launch}{passed[0]!r}"


# -- side by side ------------------------------------------------------------------------------


@contextlib.contextmanager
def _waiting_later() -> Iterator[Waits]:
    """While active, replace `AsyncCompile.wait` of Inductor in this thread: each wait for the
    system's compilers is appended to the yielded list, to be called later. The list stays empty if
    this version of Inductor has no such method; then each kernel is awaited when it is started."""
    from torch._inductor import async_compile

    compiling: Any = async_compile.AsyncCompile
    wait = getattr(compiling, "wait", None)
    pending: Waits = []
    if wait is None:
        yield pending
        return
    thread = threading.get_ident()

    def later(one: Any, scope: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            pending.append(functools.partial(wait, one, scope))
        else:
            wait(one, scope)

    compiling.wait = later
    try:
        yield pending
    finally:
        compiling.wait = wait
