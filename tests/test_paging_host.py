"""The host's side of paging: arenas, copies of their threads, what cannot be had."""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rockplan.errors import HostMemoryError, InvalidInput
from rockplan.machine import is_in_memory
from rockplan.paging import files
from rockplan.paging.arenas import pool_of
from rockplan.paging.files import FileArena
from rockplan.paging.pages import Layout, Pages, measured_link


def store(pages: Pages, tensor: torch.Tensor) -> None:
    """As the page x, to its end."""
    pages.page_out("x", tensor)
    pages.paged_out("x")


def pages_of(folder: Path, **sizes: int) -> Pages:
    pages = Pages()
    pages.layout = Layout.of(sizes.items(), pool_of("cpu", str(folder)))
    pages.layout.reserve()
    return pages


def test_tensors_come_back_as_they_lay(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    odd, turned = base[1::2], base[:12].view(3, 4).T
    bits = torch.arange(96, dtype=torch.uint8)
    pages = pages_of(tmp_path, base=base.nbytes, bits=bits.nbytes)
    expected = odd.clone(), turned.clone(), bits.clone()
    pages.page_out("base", odd, turned)
    pages.page_out("bits", bits)
    pages.paged_out("bits")
    pages.paged_out("base")
    base.zero_()
    bits.zero_()
    (bits_again,) = pages.page_in("bits")
    odd_again, turned_again = pages.page_in("base")
    pages.paged_in("base")
    pages.paged_in("bits")
    for now, then, look in zip(
        (odd_again, turned_again, bits_again), expected, (odd, turned, bits), strict=True
    ):
        assert torch.equal(now, then)
        assert (now.stride(), now.storage_offset()) == (look.stride(), look.storage_offset())
        assert not now._is_view()
    # One storage, as before, and exactly as large.
    assert odd_again.untyped_storage().data_ptr() == turned_again.untyped_storage().data_ptr()
    assert odd_again.untyped_storage().nbytes() == base.nbytes
    before = turned_again._version
    odd_again.add_(1)
    assert turned_again._version == before


def test_a_call_has_and_returns_its_arena(tmp_path: Path) -> None:
    first, second = (pages_of(tmp_path, x=4096) for _ in range(2))
    assert first.layout is not None and second.layout is not None
    pool = first.layout.pool
    assert pool is second.layout.pool
    ones, twos = torch.full((1024,), 1.0), torch.full((1024,), 2.0)
    for pages, tensor in ((first, ones), (second, twos)):
        store(pages, tensor)
    for pages, value in ((first, 1.0), (second, 2.0)):
        (x,) = pages.page_in("x")
        pages.paged_in("x")
        assert x.eq(value).all()
        pages.let_go_of_pages()
    assert len(pool._free) == 2
    larger = pool.take(8192)
    assert larger.arena.size_bytes == 8192
    assert not pool._free, "what is too small made room"


def test_pools_go_with_the_last_plan(tmp_path: Path) -> None:
    pages = pages_of(tmp_path, x=4096)
    assert any(str(tmp_path) == path for _, path in _pools())
    del pages
    gc.collect()
    assert not any(str(tmp_path) == path for _, path in _pools())


def _pools() -> list[tuple[str, str | None]]:
    from rockplan.paging import arenas

    return list(arenas._pools)


def test_copies_hold_no_tensor_and_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy waits until the other one has begun, and then for us."""
    meeting = threading.Barrier(3, timeout=200)

    def meets_twice() -> None:
        meeting.wait()
        meeting.wait()

    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(os, name, _after(meets_twice, getattr(os, name)))
    arena = FileArena(8192, str(tmp_path))
    tensor, target = torch.ones(1024), torch.empty(1024)
    before = uses(tensor), uses(target)
    copies = [
        arena.begin_out(0, tensor.untyped_storage()),
        arena.begin_in(4096, target.untyped_storage()),
    ]
    meeting.wait()
    assert (uses(tensor), uses(target)) == before
    meeting.wait()
    for copy in copies:
        copy.wait()
    assert target.eq(0).all()


def uses(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold its storage: tensors, and objects of Python."""
    storage = tensor.untyped_storage()
    tensors = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return tensors, sys.getrefcount(storage)


def _after(wait: Callable[[], object], work: Callable[..., int]) -> Callable[..., int]:
    def waits(*arguments: object) -> int:
        wait()
        return work(*arguments)

    return waits


def test_memory_stays_until_its_copy_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that goes before its fetch came: nothing else has the memory before, nor its pages."""
    goes_on = threading.Event()
    pages = pages_of(tmp_path, x=4096)
    assert pages.layout is not None
    pool = pages.layout.pool
    store(pages, torch.ones(1024))
    monkeypatch.setattr(os, "preadv", _after(lambda: goes_on.wait(200), os.preadv))
    kept = {"x": pages.page_in("x")}
    seen = kept["x"][0].untyped_storage()
    gone: list[bool] = []
    weakref.finalize(kept["x"][0], lambda: gone.append(True))
    pages.let_go_of_pages(kept)
    del kept, pages
    assert not gone and not pool._free
    goes_on.set()
    files.submit("in", lambda: None).result()
    files.submit("in", lambda: None).result()
    assert gone and len(pool._free) == 1
    assert torch.empty(0).set_(seen).eq(1).all()


# -- what cannot be had --------------------------------------------------------------------------


def test_folders_without_room_or_rights_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(HostMemoryError, match=r"(?s)4096 bytes.*missing.*host_path"):
        pages_of(tmp_path / "missing", x=4096)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(HostMemoryError, match="Not a directory"):
        pages_of(file, x=4096)
    with pytest.raises(HostMemoryError, match=r"(?s)host=\.\.\."):
        pages_of(tmp_path, x=1 << 62)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HostMemoryError, match="No space left"):
        pages_of(tmp_path, x=4096)


def test_folders_in_memory_have_the_machines_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = tmp_path / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "mounts").write_text(
        f"disk / ext4 rw 0 0\ntmpfs {tmp_path}/quick tmpfs rw 0 0\n"
        f"disk {tmp_path}/quick/slow ext4 rw 0 0\n"
    )
    assert is_in_memory(tmp_path / "quick" / "folder", tmp_path)
    assert not is_in_memory(tmp_path / "quick" / "slow", tmp_path)
    assert not is_in_memory(tmp_path, tmp_path)
    monkeypatch.setattr(files, "is_in_memory", lambda folder: True)
    monkeypatch.setattr(files, "available_bytes", lambda: 1000)
    with pytest.raises(HostMemoryError, match="in memory, which has 1000 bytes left"):
        FileArena(4096, str(tmp_path))


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_a_failing_copy_raises_at_its_wait(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    pages = pages_of(tmp_path, x=4096)
    if name == "preadv":
        store(pages, torch.ones(1024))
    monkeypatch.setattr(os, name, fails)
    with pytest.raises(HostMemoryError, match=r"(?s)4096 bytes.*Input/output error.*host_path"):
        if name == "pwritev":
            store(pages, torch.ones(1024))
        else:
            pages.page_in("x")
            pages.paged_in("x")


def test_copies_in_parts_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may copy less than it is asked to, and at most 2 GiB at once."""
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda f, parts, at: write(f, [parts[0][:1000]], at))
    monkeypatch.setattr(os, "preadv", lambda f, parts, at: read(f, [parts[0][:700]], at))
    pages = pages_of(tmp_path, x=40000)
    x = torch.arange(10000.0)
    store(pages, x)
    (again,) = pages.page_in("x")
    pages.paged_in("x")
    assert torch.equal(again, x)


def test_places_that_there_are_not() -> None:
    with pytest.raises(InvalidInput, match="meta"):
        pool_of("meta")
    with pytest.raises(InvalidInput, match="host_path is for modules on the CPU"):
        pool_of("cuda:0", "/tmp")


def test_the_link_is_measured_both_ways_at_once(tmp_path: Path) -> None:
    bytes_a_second = measured_link("cpu", str(tmp_path), page_bytes=1 << 20)
    assert 1e7 < bytes_a_second < 1e12
    with pytest.raises(HostMemoryError):
        measured_link("cpu", str(tmp_path / "missing"))


def test_a_fork_has_its_threads_and_arenas(tmp_path: Path) -> None:
    pages = pages_of(tmp_path, x=4096)
    store(pages, torch.ones(1024))
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        said = b"?"
        try:
            try:
                pages.page_in("x")
            except Exception as error:
                said = type(error).__name__.encode()
            own = pages_of(tmp_path, x=4096)
            store(own, torch.full((1024,), 2.0))
            (x,) = own.page_in("x")
            own.paged_in("x")
            said += b" %d" % x.sum()
        finally:
            os.write(send, said)
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(receive, 100) == b"BackwardError 2048"
    (x,) = pages.page_in("x")
    pages.paged_in("x")
    assert x.eq(1).all()
