"""Inductor's Triton code in Triton's interpreter, on CPU tensors: every load and store is watched.

TRITON_INTERPRET=1 has to be set before anything is imported. The interpreter runs one program after
the other: `Watch` says where one touches what another one writes, which is a race, whatever order
they happen to run in.
"""

from __future__ import annotations

import contextlib
import linecache
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics
from triton.runtime import interpreter

Configuration = Mapping[str, int]

# Called on import of a kernel; there is no driver.
triton_helpers.set_driver_to_gpu = lambda: None


# -- watching ------------------------------------------------------------------------------------


class Watch:
    """Of the storages of some tensors: which program read and wrote each element in a launch.

    races: elements that a program touched after another one wrote them, or wrote after another one
    had read them. read_again: elements that a program read after it had written them; other_lane:
    elements that were written in another place of a tile than they were read in, by one program,
    whose threads do not wait for each other.
    """

    NOBODY, SEVERAL = -1, -2

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.races: Counter[str] = Counter()
        self.read_again = self.other_lane = 0
        self._ranges = [
            (t.untyped_storage().data_ptr(), t.itemsize, t.untyped_storage().nbytes() // t.itemsize)
            for t in tensors
        ]
        self.begin()

    def begin(self) -> None:
        """A launch: what the one before did is done."""

        def nobody() -> list[Any]:
            return [numpy.full(size, self.NOBODY, numpy.int64) for _, _, size in self._ranges]

        self._readers, self._writers, self._lanes = nobody(), nobody(), nobody()

    def load(self, program: int, pointers: Any, mask: Any) -> None:
        for which, elements, lanes in self._elements(pointers, mask):
            writer, readers = self._writers[which][elements], self._readers[which]
            others = (writer != self.NOBODY) & (writer != program)
            self._say("reads what another program wrote", others)
            self.read_again += int((writer == program).sum())
            is_own = (readers[elements] == self.NOBODY) | (readers[elements] == program)
            readers[elements] = numpy.where(is_own, program, self.SEVERAL)
            self._lanes[which][elements] = lanes

    def store(self, program: int, pointers: Any, mask: Any) -> None:
        for which, elements, lanes in self._elements(pointers, mask):
            reader, writer = self._readers[which][elements], self._writers[which][elements]
            read = (reader != self.NOBODY) & (reader != program)
            self._say("writes what another program reads", read)
            written = (writer != self.NOBODY) & (writer != program)
            self._say("writes what another program wrote", written)
            moved = (reader == program) & (self._lanes[which][elements] != lanes)
            self.other_lane += int(moved.sum())
            self._writers[which][elements] = program

    def _say(self, what: str, elements: Any) -> None:
        if number := int(elements.sum()):
            self.races[what] += number

    def _elements(self, pointers: Any, mask: Any) -> Iterator[tuple[int, Any, Any]]:
        """Which of the storages, elements of it, and their places in the tile."""
        addresses = pointers.reshape(-1).astype(numpy.int64)
        wanted = numpy.ones(addresses.shape, bool)
        if mask is not None:
            wanted = numpy.broadcast_to(mask, pointers.shape).reshape(-1).astype(bool)
        lanes = numpy.arange(addresses.size)
        for which, (base, itemsize, size) in enumerate(self._ranges):
            inside = wanted & (addresses >= base) & (addresses < base + itemsize * size)
            if inside.any():
                yield which, (addresses[inside] - base) // itemsize, lanes[inside]


_watches: list[Watch] = []


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Kernels that are launched inside are seen by it."""
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)


def _hook() -> None:
    builder: Any = interpreter.InterpreterBuilder

    def seen(name: str, tell: Callable[..., None], where: int, mask: int) -> None:
        plain = getattr(builder, name)

        def watched(self: Any, *given: Any) -> Any:
            x, y, z = map(int, self.grid_idx)
            program = x + (y << 24) + (z << 44)
            for watch in _watches:
                tell(watch, program, given[where].data, given[mask].data)
            return plain(self, *given)

        setattr(builder, name, watched)

    seen("create_masked_load", Watch.load, where=0, mask=1)
    seen("create_masked_store", Watch.store, where=0, mask=2)
    seen("create_atomic_rmw", Watch.store, where=1, mask=3)


_hook()


# -- Inductor's code -----------------------------------------------------------------------------


class _Libdevice:
    """Functions of libdevice, by those of torch: the interpreter has none."""

    _NAMES = {"rint": "round", "llrint": "round"}

    def __getattr__(self, name: str) -> Any:
        of_torch = getattr(torch, self._NAMES.get(name, name), None)
        if of_torch is None:
            raise NotImplementedError(f"libdevice.{name}")

        def function(*given: Any) -> Any:
            blocks = [one for one in given if hasattr(one, "handle")]
            arguments = [
                torch.from_numpy(numpy.ascontiguousarray(one.handle.data)) if one in blocks else one
                for one in given
            ]
            handle = interpreter.TensorHandle(of_torch(*arguments).numpy(), blocks[0].handle.dtype)
            return tl.core.tensor(handle, blocks[0].type)

        return function


_HEURISTICS = (
    *("pointwise", "reduction", "persistent_reduction", "cooperative_reduction"),
    *("split_scan", "foreach"),
)


class _Kernel:
    """A Triton kernel of Inductor's, which runs as its launcher would launch it."""

    def __init__(self, name: str, source: str, configurations: Mapping[str, Configuration]) -> None:
        self.triton_meta: Any = {}
        self.inductor_meta: Any = {}
        self.config = configurations[function_source(source)]
        self.function: Any = None
        scope: dict[str, Any] = {"__name__": name, "__file__": name}
        # Where the interpreter finds the source.
        file = f"<{name} {id(self)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        with self._instead_of_heuristics():
            exec(compile(source, file, "exec"), scope)
        self.function.fn.__globals__["libdevice"] = _Libdevice()

    @contextlib.contextmanager
    def _instead_of_heuristics(self) -> Iterator[None]:
        """Decorators hand the function over, and tune nothing."""

        def heuristic(*, triton_meta: Any, inductor_meta: Any, **rest: Any) -> Any:
            self.triton_meta, self.inductor_meta = triton_meta, inductor_meta
            return lambda function: setattr(self, "function", function)

        names = [name for name in _HEURISTICS if hasattr(triton_heuristics, name)]
        before = {name: getattr(triton_heuristics, name) for name in names}
        for name in names:
            setattr(triton_heuristics, name, heuristic)
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(triton_heuristics, name, function)

    def run(self, *arguments: Any, stream: Any = None) -> None:
        fixed = {**self.triton_meta["constants"], **self.config}
        names = [name for name in self.function.arg_names if name not in fixed]
        given = dict(zip(names, arguments, strict=False))
        numbers = {name: one for name, one in given.items() if isinstance(one, int)}
        grid = triton_heuristics.GridExpr.from_meta(self.inductor_meta, dict(self.config))
        scope: dict[str, Any] = {**numbers, **fixed}
        for line in grid.prefix:
            exec(line, {}, scope)
        sizes = (grid.x_grid, grid.y_grid, grid.z_grid)
        programs = tuple(eval(str(size), {"max": max}, scope) for size in sizes)
        for watch in _watches:
            watch.begin()
        known = {name: one for name, one in fixed.items() if name in self.function.arg_names}
        self.function[programs](**given, **known)


def function_source(source: str) -> str:
    """Of a module that has one Triton kernel, that itself: what its configuration depends on."""
    return source[source.index("def triton_") :].strip()


_DEFINED = r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)"
_OF_CUDA = {
    "_dynamo.guards._empty_strided_cuda": "_dynamo.guards._empty_strided_cpu",
    "with torch.cuda._DeviceGuard(0):": "if True:",
    "torch.cuda.set_device(0)": "pass",
    "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": (
        "get_raw_stream = lambda _: 0"
    ),
    "device='cuda:0'": "device='cpu'",
    "type='cuda', index=0": "type='cpu'",
    "async_compile.wait(globals())": "",
    "del async_compile": "",
    "async_compile = AsyncCompile()": "",
}


def loaded(code: str, configurations: Mapping[str, Configuration]) -> Callable[[list[Any]], Any]:
    """What calls the kernels of an Inductor module, for CPU tensors."""
    kernels = {
        name: _Kernel(name, source, configurations)
        for name, source in re.findall(_DEFINED, code, re.DOTALL)
    }
    code = re.sub(rf"\w+ = {_DEFINED}", "", code, flags=re.DOTALL)
    for on_cuda, here in _OF_CUDA.items():
        code = code.replace(on_cuda, here)
    scope: dict[str, Any] = {"__name__": "inductor_module", **kernels}
    exec(compile(code.split("\ndef get_args()")[0], "<inductor module>", "exec"), scope)
    call: Callable[[list[Any]], Any] = scope["call"]
    return call
