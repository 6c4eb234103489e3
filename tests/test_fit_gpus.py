"""Devices by name, by bytes, by torch.device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import rockplan
from rockplan.cli.ending import ExitCode
from rockplan.cli.main import app
from rockplan.errors import InvalidInput
from rockplan.examples import mlp
from rockplan.fitting.gpus import CONTEXT_BYTES, GPUS, Gpu, gpu, listing
from rockplan.machine import total_bytes


@pytest.mark.parametrize("row", GPUS, ids=str)
def test_rows_are_found_by_name_and_consistent(row: Gpu) -> None:
    assert gpu(row.name) is gpu(row.name.upper()) is gpu(row) is row
    assert row.bandwidth_gb_s and row.link_gb_s and row.capability
    if row.tflops:
        # Units for bfloat16 came with compute capability 8.0.
        has_bf16 = row.capability >= (8, 0)
        assert row.tflops.float32 < row.tflops.float16
        assert (row.tflops.bfloat16 > row.tflops.float32) is has_bf16
    assert row.usable_bytes == row.memory_bytes - CONTEXT_BYTES
    assert row.name in listing()


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Tesla T4", "t4"),
        ("NVIDIA H100 80GB HBM3", "h100-80"),
        ("h100", "h100-80"),
        ("NVIDIA H100 PCIe", "h100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("A100 80GB PCIe", "a100-80"),
        ("a100_80gib", "a100-80"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx5090", "rtx-5090"),
        ("4090", "rtx-4090"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA H200", "h200"),
    ],
)
def test_usual_spellings(spelling: str, name: str) -> None:
    assert gpu(spelling).name == name


@pytest.mark.parametrize(
    ("given", "size_bytes"),
    [("80GiB", 80 << 30), ("24 GB", 24 * 10**9), ("1.5TiB", 3 << 39), (16 << 30, 16 << 30)],
)
def test_bytes(given: object, size_bytes: int) -> None:
    device = gpu(given)
    assert device.memory_bytes == size_bytes
    assert device.tflops is None
    # Of an unknown device the larger workspace.
    assert device.cublas_bytes == 32 << 20


def test_workspace_by_compute_capability() -> None:
    assert {row.cublas_bytes for row in GPUS if row.name in ("t4", "a100-80", "rtx-4090")} == {
        4096 * 1024 * 2 + 16 * 1024 * 8
    }
    assert {row.cublas_bytes for row in GPUS if row.name in ("h100-80", "b200", "rtx-5090")} == {
        32 << 20
    }


@pytest.mark.parametrize(
    "given",
    [
        "h1000",
        "",
        "24",
        "40%",
        "min",
        "auto",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        None,
        True,
        1.5,
        torch.device("meta"),
    ],
    ids=repr,
)
def test_unknown_devices_are_told_the_list(given: object) -> None:
    with pytest.raises(InvalidInput, match="is not known: give one of t4, v100-16.*'80GiB'"):
        gpu(given)


@pytest.mark.parametrize("option", ["--gpu", "--device"])
def test_a_device_is_an_option_by_either_name(option: str) -> None:
    done = CliRunner().invoke(app, ["fit", option, "h1000"])
    assert done.exit_code == ExitCode.USAGE and "'h1000' is not known" in done.output


def test_what_means_more_than_one_is_said() -> None:
    with pytest.raises(InvalidInput, match="more than one: give one of a100-40, a100-80, bytes"):
        gpu("a100")


@pytest.mark.parametrize("given", [0, -1, "0GiB", "9999999999TiB"])
def test_bytes_that_no_device_has(given: object) -> None:
    with pytest.raises(InvalidInput, match="device "):
        gpu(given)


@pytest.mark.parametrize(
    ("title", "name", "has_row"),
    [("NVIDIA H100 80GB HBM3", "h100-80", True), ("Some GPU", "Some GPU", False)],
)
def test_a_device_at_hand_says_its_own_bytes(
    title: str, name: str, has_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(name=title, total_memory=123 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    device = gpu(torch.device("cuda", 0))
    assert (device.name, device.memory_bytes, device.capability) == (name, 123 << 30, (9, 0))
    assert (device.tflops is not None) is has_row
    assert device.at_hand == "cuda:0" and device == gpu("cuda:0")
    assert gpu("cuda:1") == replace(device, at_hand="cuda:1")


@pytest.mark.parametrize(("others_gib", "is_said"), [(0, False), (20, True)])
def test_what_others_hold_is_said(
    others_gib: int, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"cuda:1": ((80 - 10 - others_gib) << 30) - CONTEXT_BYTES}
    found = SimpleNamespace(name="NVIDIA H100", total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 << 30)
    model, (x,), _ = mlp()
    said = str(rockplan.fit(model, x, "cuda:1", sizes={0: (1, 2)})).replace("\n", " ")
    assert ("others hold 20.00 GiB of cuda:1 now; '61440MiB' as" in said) is is_said
    assert gpu("61440MiB").memory_bytes == 60 << 30


def test_this_machines_cpu_has_no_caching_allocator() -> None:
    for device in (gpu(torch.device("cpu")), gpu("cpu")):
        assert device.is_cpu and device.memory_bytes == total_bytes()
        assert device.cublas_bytes == 0 and device.tflops is None


def test_a_device_that_is_not_there_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InvalidInput, match="is none of this machine .* `rockplan fit --gpu list`"):
        gpu(torch.device("cuda"))
