"""Partition: blocks cover the graph, stand alone, and account for every byte of the whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

from rockplan.graph_builder.capture import capture
from rockplan.graph_builder.digests import graph_digest, problem_digest
from rockplan.graph_builder.partition import choose_pins, partition, side_storages
from rockplan.graph_builder.pipeline import lower
from rockplan.oracles.simulate import simulate
from rockplan.oracles.verify import verify
from rockplan.values.block import Block
from rockplan.values.graph import CDGraph, DataKind, Phase, TensorSpec, Value
from rockplan.values.schedule import keep_all, with_frees
from testing.graphs import Draft, Ranges, block_graphs, cd_graphs, chains, random_chain

# Saved generator states belong to nodes, not to blocks; without them the sums are exact.
NO_STATES = Ranges(max_rng_state_bytes=0)


def given(*strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """hypothesis.given with as many examples as a second or two allow."""
    return lambda test: settings(max_examples=60, deadline=None)(
        hypothesis_given(*strategies)(test)
    )


def graphs() -> st.SearchStrategy[CDGraph]:
    chained = chains(5, 4, NO_STATES).map(lambda chain: chain[0])
    return st.one_of(chained, cd_graphs(10, NO_STATES))


def check_slices(graph: CDGraph, blocks: Sequence[Block]) -> None:
    assert [n for b in blocks for n in b.forward] == [n.index for n in graph.forward]
    assert [n for b in reversed(blocks) for n in b.backward] == [n.index for n in graph.backward]
    for lower_block, upper_block in zip(blocks, blocks[1:], strict=False):
        assert upper_block.input == lower_block.output
    for block in blocks:
        verify(block.problem, keep_all(block.problem))


@given(graphs())
def test_blocks_are_slices_and_their_problems_are_legal(graph: CDGraph) -> None:
    check_slices(graph, partition(graph))


@given(graphs())
def test_problems_repeat_the_prices_of_their_nodes(graph: CDGraph) -> None:
    for block in partition(graph):
        for local, index in zip(
            block.problem.nodes, (*block.forward, *block.backward), strict=True
        ):
            node = graph.nodes[index]
            assert (local.phase, local.time_ns) == (node.phase, node.time_ns)
            assert (local.random, local.recomputable) == (node.random, node.recomputable)
            assert local.workspace_bytes >= node.workspace_bytes
            assert len(local.writes) <= len(node.writes)


def again(block: Block) -> list[int]:
    """Local forward nodes that a recomputation of the block executes."""
    return [n.index for n in block.problem.forward if n.recomputable and n.writes]


def local_peaks(block: Block, recompute: bool) -> tuple[int, int, int]:
    """(forward peak, backward peak, saved bytes) of a block kept or recomputed as a whole."""
    problem = block.problem
    forward = [n.index for n in problem.forward]
    backward = [n.index for n in problem.backward]
    schedule = with_frees(problem, forward, (again(block) if recompute else []) + backward)
    verify(problem, schedule)
    result = simulate(problem, schedule)
    return result.forward_peak_bytes, result.backward_peak_bytes, result.saved_bytes


@given(graphs(), st.lists(st.booleans(), min_size=40, max_size=40))
def test_sum_of_blocks_bounds_the_whole(graph: CDGraph, choices: list[bool]) -> None:
    """Each block is kept or recomputed before its backward: saved bytes of the blocks below,
    the block's own peak and its background never fall short of the whole schedule's peak."""
    blocks = partition(graph)
    recomputed = dict(zip(blocks, choices, strict=False)) | {blocks[-1]: False}
    backward: list[int] = []
    for block in reversed(blocks):
        if recomputed[block]:
            backward += [block.forward[n] for n in again(block)]
        backward += block.backward
    schedule = with_frees(graph, [n.index for n in graph.forward], backward)
    verify(graph, schedule)
    bound = below = 0
    for block in blocks:
        forward_peak, backward_peak, saved = local_peaks(block, recomputed[block])
        bound = max(bound, below + max(forward_peak, backward_peak) + block.background_bytes)
        below += saved
    assert simulate(graph, schedule).peak_bytes <= bound


@given(graphs())
def test_background_covers_every_rerun_of_a_block(graph: CDGraph) -> None:
    """Nothing is saved: before each backward slice all blocks run forward again from the input."""
    blocks = partition(graph)
    backward: list[int] = []
    bound = 0
    for s, block in reversed(list(enumerate(blocks))):
        if s < len(blocks) - 1:
            backward += [b.forward[n] for b in blocks[: s + 1] for n in again(b)]
        backward += block.backward
        for rerun in blocks[: s + 1]:
            arriving = 0 if rerun.input is None else graph.data[rerun.input].size_bytes
            forward_peak, backward_peak, _ = local_peaks(rerun, rerun is not blocks[-1])
            peak = forward_peak + block.incoming_gradient_bytes
            if rerun is block:
                peak = max(peak, backward_peak)
            tangents = sum(d.size_bytes for d in block.problem.data if d.kind is DataKind.TANGENT)
            assert tangents >= block.incoming_gradient_bytes
            bound = max(bound, arriving + peak + rerun.background_bytes)
    schedule = with_frees(graph, [n.index for n in graph.forward], backward)
    verify(graph, schedule)
    assert simulate(graph, schedule).peak_bytes <= bound


def exact_chain(seed: int) -> CDGraph:
    """A chain without pins whose output and tangent take no bytes."""
    rng = random.Random(seed)
    lengths = tuple(rng.randint(1, 3) for _ in range(rng.randint(2, 4)))
    graph, _ = random_chain(rng, lengths, replace(NO_STATES, pinned_percent=0))
    weightless = tuple(
        replace(d, size_bytes=0) if d.index in graph.outputs or d.kind is DataKind.TANGENT else d
        for d in graph.data
    )
    return replace(graph, data=weightless)


def test_keep_all_of_a_chain_sums_exactly() -> None:
    """Where there is no background and the backward of every block reads its output, the
    blocks add up to the peak of the whole, byte for byte."""
    checked = 0
    for graph in map(exact_chain, range(400)):
        blocks = partition(graph, frozenset(d.index for d in graph.data))
        if len(blocks) == 1 or any(b.background_bytes for b in blocks):
            continue
        if not all(any(b.output in graph.nodes[n].reads for n in b.backward) for b in blocks[:-1]):
            continue
        bound = below = 0
        for block in blocks:
            forward_peak, backward_peak, saved = local_peaks(block, False)
            bound = max(bound, below + max(forward_peak, backward_peak))
            below += saved
        assert simulate(graph, keep_all(graph)).peak_bytes == bound
        checked += 1
    assert checked >= 20


@given(block_graphs())
def test_problem_digest_is_of_what_a_solver_sees(problem: CDGraph) -> None:
    digest = problem_digest(problem)
    visible = [not d.kind.resident or d.kind is DataKind.INPUT for d in problem.data]
    renamed = tuple(
        replace(d, name="x", size_bytes=d.size_bytes + 7 * (not seen))
        for d, seen in zip(problem.data, visible, strict=True)
    )
    assert problem_digest(replace(problem, data=renamed)) == digest
    first = problem.nodes[0]
    for changed in (
        replace(first, time_ns=first.time_ns + 1),
        replace(first, workspace_bytes=first.workspace_bytes + 1),
        replace(first, random=not first.random),
        replace(first, recomputable=not first.recomputable),
        replace(first, writes=()),
    ):
        assert problem_digest(replace(problem, nodes=(changed, *problem.nodes[1:]))) != digest
    for index, data in enumerate(problem.data):
        if visible[index]:
            larger = replace(data, size_bytes=data.size_bytes + 1)
            others = (*problem.data[:index], larger, *problem.data[index + 1 :])
            assert problem_digest(replace(problem, data=others)) != digest
    assert problem_digest(replace(problem, outputs=())) != digest
    assert problem_digest(replace(problem, rng_state_bytes=99)) != digest


@given(graphs())
def test_partition_is_a_function_of_the_graph(graph: CDGraph) -> None:
    assert partition(graph) == partition(graph)
    assert all(b.digest == problem_digest(b.problem) for b in partition(graph))


# Graphs written by hand


def spec(dtype: str) -> TensorSpec:
    return TensorSpec((4,), (1,), 0, dtype, "cpu")


def chain_with_mask(mask_source: str) -> CDGraph:
    """x -> a -> b -> c -> d, where a mask made from an input is read by every node."""
    draft = Draft()
    x = draft.add_data(DataKind.INPUT, 4)
    ids = draft.add_data(DataKind.INPUT, 4)
    weight = draft.add_data(DataKind.PARAMETER, 4)
    mask = draft.add_data(DataKind.ACTIVATION, 100)
    draft.add_node(Phase.FORWARD, [ids], [mask], time_ns=1)
    states = [x]
    for _ in range(4):
        states.append(draft.add_data(DataKind.ACTIVATION, 10))
        draft.add_node(Phase.FORWARD, [states[-2], mask, weight], [states[-1]], time_ns=1)
    gradient = draft.add_data(DataKind.TANGENT, 10)
    for state in states[-2:0:-1]:
        made = draft.add_data(DataKind.GRADIENT, 10)
        draft.add_node(Phase.BACKWARD, [gradient, state, mask], [made], time_ns=1)
        gradient = made
    graph = draft.finish((states[-1],), (states[-1],))
    return replace(
        graph,
        values=(Value(0, x, "x", spec("torch.float32")), Value(1, ids, "ids", spec(mask_source))),
    )


def test_masks_from_integer_inputs_are_pinned() -> None:
    graph = chain_with_mask("torch.int64")
    mask = graph.nodes[0].writes[0]
    assert side_storages(graph) == {mask}
    blocks = partition(graph)
    assert len(blocks) == 4
    assert all(d.size_bytes != 100 or d.kind is DataKind.CONSTANT for d in problem_data(blocks))
    # The mask, the output that the caller holds, and below the last block its tangent.
    assert [b.background_bytes for b in blocks] == [120, 120, 120, 110]


def test_masks_from_floating_inputs_are_activations() -> None:
    graph = chain_with_mask("torch.bfloat16")
    assert side_storages(graph) == frozenset()
    assert [len(b.forward) for b in partition(graph, pins=frozenset())] == [1, 4]
    assert len(partition(graph, differentiable_inputs=frozenset({0}))) == 4


def test_pins_are_taken_out_of_the_search() -> None:
    graph = chain_with_mask("torch.bfloat16")
    assert len(partition(graph, pins=frozenset({graph.nodes[0].writes[0]}))) == 4


def test_side_storage_of_one_block_is_its_own() -> None:
    draft = Draft()
    ids = draft.add_data(DataKind.INPUT, 4)
    a = draft.add_data(DataKind.ACTIVATION, 7)
    b = draft.add_data(DataKind.ACTIVATION, 10)
    c = draft.add_data(DataKind.ACTIVATION, 10)
    weight = draft.add_data(DataKind.PARAMETER, 4)
    draft.add_node(Phase.FORWARD, [ids], [a], time_ns=1)
    draft.add_node(Phase.FORWARD, [a, weight], [b], time_ns=1)
    draft.add_node(Phase.FORWARD, [b, weight], [c], time_ns=1)
    graph = replace(draft.finish((c,), (c,)), values=(Value(0, ids, "ids", spec("torch.int64")),))
    first, _ = partition(graph)
    assert [d.kind for d in first.problem.data if d.size_bytes == 7] == [DataKind.ACTIVATION]
    assert first.background_bytes == 0


def problem_data(blocks: Sequence[Block]) -> Iterator[object]:
    return (d for b in blocks for d in b.problem.data)


def two_headed_chain() -> CDGraph:
    """x -> a -> b -> c; a and c are results, so two tangents of 50 and 5 bytes arrive."""
    draft = Draft()
    x = draft.add_data(DataKind.INPUT, 4)
    a, b, c = (draft.add_data(DataKind.ACTIVATION, 10) for _ in range(3))
    draft.add_node(Phase.FORWARD, [x], [a], time_ns=1)
    draft.add_node(Phase.FORWARD, [a], [b], time_ns=1)
    draft.add_node(Phase.FORWARD, [b], [c], time_ns=1)
    early = draft.add_data(DataKind.TANGENT, 50)
    late = draft.add_data(DataKind.TANGENT, 5)
    g_b, g_a, g_x = (draft.add_data(DataKind.GRADIENT, 10) for _ in range(3))
    draft.add_node(Phase.BACKWARD, [late, c], [g_b], time_ns=1)
    draft.add_node(Phase.BACKWARD, [g_b, b], [g_a], time_ns=1)
    draft.add_node(Phase.BACKWARD, [g_a, early, x], [g_x], time_ns=1)
    draft.handed.append(g_x)
    return draft.finish((a, c), (a, c))


def test_tangents_for_lower_blocks_are_background_above() -> None:
    graph = two_headed_chain()
    lower_block, upper_block = partition(graph, frozenset({0}))
    assert [d.size_bytes for d in lower_block.problem.data if d.kind is DataKind.TANGENT] == [
        10,
        50,
    ]
    # Above: both results and the early tangent. Below, while the block above runs backward: same.
    assert upper_block.background_bytes == 10 + 10 + 50
    assert lower_block.background_bytes == 10 + 10 + 50 + 5
    assert lower_block.incoming_gradient_bytes == 10


def test_a_gradient_across_several_boundaries_is_background() -> None:
    """Tied weights: the gradient made by the last block is added to in the first."""
    draft = Draft()
    x = draft.add_data(DataKind.INPUT, 4)
    states = [x, *(draft.add_data(DataKind.ACTIVATION, 10) for _ in range(4))]
    for before, after in zip(states, states[1:], strict=False):
        draft.add_node(Phase.FORWARD, [before], [after], time_ns=1)
    gradient = draft.add_data(DataKind.TANGENT, 10)
    tied = draft.add_data(DataKind.GRADIENT, 1000)
    for state in states[-2:0:-1]:
        made = draft.add_data(DataKind.GRADIENT, 10)
        draft.add_node(Phase.BACKWARD, [gradient, state], [made], time_ns=1)
        if state == states[-2]:
            draft.add_node(Phase.BACKWARD, [gradient, state], [tied], time_ns=1)
        gradient = made
    total = draft.add_data(DataKind.GRADIENT, 1000)
    draft.add_node(Phase.BACKWARD, [gradient, tied, x], [total], time_ns=1)
    draft.handed.append(total)
    graph = draft.finish((states[-1],), (states[-1],))
    blocks = partition(graph, frozenset({x}))
    assert len(blocks) == 4
    assert [b.background_bytes for b in blocks[:-1]] == [1020, 1020, 1020]
    assert [b.incoming_gradient_bytes for b in blocks] == [10, 10, 10, 0]
    sizes = [[d.size_bytes for d in b.problem.data if not d.kind.resident] for b in blocks]
    assert [s.count(1000) for s in sizes] == [1, 0, 0, 0]


def test_an_illegal_boundary_joins_its_blocks() -> None:
    """The backward of the first block runs before that of the second one has ended."""
    draft = Draft()
    x = draft.add_data(DataKind.INPUT, 4)
    inner, a, hidden, b, c = (draft.add_data(DataKind.ACTIVATION, 10) for _ in range(5))
    draft.add_node(Phase.FORWARD, [x], [inner, a], time_ns=1)
    draft.add_node(Phase.FORWARD, [a], [hidden, b], time_ns=1)
    draft.add_node(Phase.FORWARD, [b], [c], time_ns=1)
    tangent = draft.add_data(DataKind.TANGENT, 10)
    first, second, third = (draft.add_data(DataKind.GRADIENT, 10) for _ in range(3))
    draft.add_node(Phase.BACKWARD, [tangent, b], [first], time_ns=1)
    draft.add_node(Phase.BACKWARD, [first, inner], [second], time_ns=1)
    draft.add_node(Phase.BACKWARD, [second, hidden], [third], time_ns=1)
    draft.handed.append(third)
    blocks = partition(draft.finish((c,), (c,)), frozenset({x}))
    assert [(b.forward, b.backward) for b in blocks] == [((0, 1), (4, 5)), ((2,), (3,))]


def test_results_of_nodes_that_run_once_are_kept() -> None:
    graph, _ = random_chain(random.Random(1), (2, 2), NO_STATES)
    once = tuple(
        replace(n, recomputable=False) if n.phase is Phase.FORWARD else n for n in graph.nodes
    )
    blocks = partition(replace(graph, nodes=once))
    assert len(blocks) == 1
    assert not any(n.writes for n in blocks[0].problem.forward)


# Real models


def gpt2() -> CDGraph:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=4,
        n_embd=32,
        n_head=2,
        vocab_size=64,
        n_positions=16,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.arange(16).reshape(2, 8)
    return lower(capture(model, (), {"input_ids": ids, "labels": ids.clone()}), 0).graph


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


def double_convolution(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1), nn.GroupNorm(2, after), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, width: int = 4, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(depth + 1)]
        pairs = list(zip(widths, widths[1:], strict=False))
        self.first = double_convolution(3, width)
        self.down = nn.ModuleList(double_convolution(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.merge = nn.ModuleList(double_convolution(b, a) for a, b in reversed(pairs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(nn.functional.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skips.pop()], 1))
        return x


@cache
def captured(name: str) -> CDGraph:
    if name == "gpt2":
        return gpt2()
    if name == "resnet":
        model: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3), *(Residual(8) for _ in range(5)))
        return lower(capture(model, (torch.zeros(2, 3, 8, 8),), {}), 0).graph
    return lower(capture(UNet(), (torch.zeros(1, 3, 16, 16),), {}), 0).graph


@pytest.mark.parametrize("name", ["gpt2", "resnet", "unet"])
def test_real_models_partition(name: str) -> None:
    graph = captured(name)
    blocks = partition(graph)
    check_slices(graph, blocks)
    assert all(b.backward for b in blocks[1:])


def test_gpt2_falls_into_attention_and_mlp_halves() -> None:
    blocks = partition(captured("gpt2"))
    attention = [b for b in blocks if b.name.startswith("transformer.h") and "attn" in b.name]
    mlp = [b for b in blocks if b.name.startswith("transformer.h") and "mlp" in b.name]
    assert [b.name for b in attention] == [f"transformer.h.{k}.attn" for k in range(4)]
    assert [b.name for b in mlp] == [f"transformer.h.{k}.mlp" for k in range(4)]
    assert len({b.digest for b in attention}) == len({b.digest for b in mlp}) == 1
    assert [b.index for b in mlp] == [b.index + 1 for b in attention]
    for first, second in zip(attention, mlp, strict=True):
        assert {n.module for n in nodes(captured("gpt2"), second.backward)} <= {
            m.module for m in nodes(captured("gpt2"), second.forward)
        }
        assert first.incoming_gradient_bytes == captured("gpt2").data[first.output].size_bytes


def nodes(graph: CDGraph, indices: Sequence[int]) -> Iterator[object]:
    return (graph.nodes[i] for i in indices)


def test_residual_blocks_share_a_digest() -> None:
    blocks = [b for b in partition(captured("resnet")) if len(b.forward) > 2]
    assert len(blocks) == 5
    assert len({b.digest for b in blocks}) == 1


def test_unet_needs_pins_and_gets_them() -> None:
    graph = captured("unet")
    alone = partition(graph, pins=frozenset())
    pins = choose_pins(graph, frozenset(graph.held))
    assert 0 < len(pins) <= 3
    pinned = partition(graph)
    assert max(len(b.forward) for b in alone) > 40 >= max(len(b.forward) for b in pinned)


def test_the_digest_covers_all_but_prices() -> None:
    graph = captured("resnet")
    dearer = tuple(replace(n, time_ns=n.time_ns + 1, source="elsewhere.py:1") for n in graph.nodes)
    assert graph_digest(replace(graph, nodes=dearer)) == graph_digest(graph)
    value = graph.values[-1]
    other = replace(value, spec=replace(value.spec, dtype="torch.float64"))
    assert graph_digest(replace(graph, values=(*graph.values[:-1], other))) != graph_digest(graph)
