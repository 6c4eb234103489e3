"""From options to schedules of whole graphs: links, stitching, dead re-executions, budgets."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import pytest

from rockplan.dp.chain_solver import ChainSolver, pinned_storages, stitch
from rockplan.dp.links import Operation, RunForward, RunOption, links
from rockplan.dp.recurrence import decode, fastest_need, grid, minimum_needs, solve
from rockplan.dp.segments import intern_segments
from rockplan.oracles.simulate import simulate, timeline
from rockplan.oracles.verify import verify
from rockplan.values.block import Block, OptionFamily
from rockplan.values.graph import CDGraph, DataKind, Phase, producers
from rockplan.values.order import Orders, without_idle
from rockplan.values.schedule import Compute, keep_all, with_frees
from testing.exhaustive import Exhaustive
from testing.families import enumerated_family, families, gpt_problems, join
from testing.graphs import Draft, Ranges, random_chain, repeated_chain

Chain = tuple[CDGraph, tuple[Block, ...], tuple[OptionFamily, ...]]


def generated(seed: int) -> Chain:
    """Chains of one to six blocks, sizes from equal to diverse, some alike, some with nodes that
    may run only once."""
    rng = random.Random(seed)
    ranges = Ranges(pinned_percent=rng.choice([0, 0, 10]), max_size_bytes=rng.choice([2, 12, 90]))
    if rng.random() < 0.4:
        graph, blocks = repeated_chain(rng, rng.randint(2, 6), rng.randint(1, 3), ranges)
    else:
        lengths = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 5)))
        graph, blocks = random_chain(rng, lengths, ranges)
    return graph, blocks, families(blocks)


# Links


@pytest.mark.parametrize("seed", range(12))
def test_links_cost_what_the_options_say(seed: int) -> None:
    _, blocks, found = generated(seed)
    for link, block, family in zip(links(blocks, found), blocks, found, strict=True):
        for cost in link.first.held:
            option = family.options[cost.option]
            assert cost.saved_bytes == option.saved_bytes
            assert cost.forward_peak_bytes == option.forward_peak_bytes
            assert cost.backward_peak_bytes == option.backward_peak_bytes
            assert cost.time_ns == option.time_ns
        assert link.first.held[0].time_ns == block.problem.time_ns
        assert link.again.held[0].time_ns <= link.first.held[0].time_ns
        assert link.closing.held[0].time_ns <= link.again.held[0].time_ns
        assert link.again_forward.time_ns <= link.first_forward.time_ns


def test_closing_runs_leave_out_the_next_blocks_need() -> None:
    """A block that runs again for its own backward alone need not finish its output: here the
    product with the second matrix, which no backward node reads."""
    draft = Draft()
    x, y, z = (draft.add_data(k, 4) for k in (DataKind.INPUT, *[DataKind.ACTIVATION] * 2))
    draft.add_node(Phase.FORWARD, [x], [y], time_ns=7, name="first product")
    draft.add_node(Phase.FORWARD, [y], [z], time_ns=11, name="second product")
    tangent, middle, last = (
        draft.add_data(k, 4) for k in (DataKind.TANGENT, *[DataKind.GRADIENT] * 2)
    )
    draft.add_node(Phase.BACKWARD, [tangent, y], [middle], time_ns=13)
    draft.add_node(Phase.BACKWARD, [middle, x], [last], time_ns=17)
    problem = draft.finish((z,), (last,))
    block = Block(0, (0, 1), (2, 3), None, z, problem, "two products", 4, 0)
    (link,) = links([block], [enumerated_family(problem)])
    assert [c.time_ns for c in link.first.held] == [48, 55]
    assert [c.time_ns for c in link.again.held] == [48, 55]
    assert [(c.time_ns, c.backward_peak_bytes) for c in link.closing.held] == [(37, 12)]


def test_equal_blocks_share_a_link() -> None:
    _, blocks = join(gpt_problems(3))
    found = links(blocks, families(blocks, 8192))
    assert found[1] is found[3] and found[2] is found[4]
    assert len(set(found)) == 4
    changed = (replace(blocks[1], background_bytes=1), *blocks[2:])
    assert len(set(links(changed, families(changed, 8192)))) == 4


def test_a_block_without_options_is_refused() -> None:
    _, blocks = join(gpt_problems(1))
    with pytest.raises(ValueError, match="block 0 .* has no options"):
        links(blocks, [OptionFamily((), 0)] * len(blocks))


# Idle re-executions


def without(graph: CDGraph, order: Orders, kept: Collection[int] = ()) -> Orders:
    return Orders(*without_idle(graph, order.forward, order.backward, kept=kept))


@pytest.mark.parametrize("seed", range(12))
def test_dropping_dead_runs_keeps_schedules_legal(seed: int) -> None:
    """Random legal orders with re-executions anywhere: what is left is legal, takes no longer,
    and runs no node again of which nothing is read."""
    rng = random.Random(seed)
    graph, blocks, _ = generated(seed)
    order = scattered_order(graph, rng)
    kept = pinned_storages(graph, blocks)
    before = with_frees(graph, order.forward, order.backward)
    verify(graph, before)
    dropped = without(graph, order, kept)
    after = with_frees(graph, dropped.forward, dropped.backward)
    verify(graph, after)
    assert simulate(graph, after).time_ns <= simulate(graph, before).time_ns
    if not kept and all(n.recomputable for n in graph.nodes):
        assert simulate(graph, after).peak_bytes <= simulate(graph, before).peak_bytes
    assert without(graph, dropped, kept) == dropped
    assert_no_dead_runs(graph, dropped)


def scattered_order(graph: CDGraph, rng: random.Random) -> Orders:
    """Every node once, with forward nodes that may run again thrown in after their inputs."""
    forward = [n.index for n in graph.forward]
    both = [*forward, *(n.index for n in graph.backward)]
    for _ in range(rng.randint(1, 12)):
        node = graph.nodes[rng.choice(forward)]
        if node.recomputable:
            both.insert(rng.randint(both.index(node.index) + 1, len(both)), node.index)
    last = max(i for i, n in enumerate(both) if n in set(forward) and both.index(n) == i)
    split = rng.randint(last + 1, min(i for i, n in enumerate(both) if n not in set(forward)))
    return Orders(tuple(both[:split]), tuple(both[split:]))


def assert_no_dead_runs(graph: CDGraph, order: Orders) -> None:
    """The result of every re-execution is read, or ends the forward phase as an output, before
    it is made again."""
    both = (*order.forward, *order.backward)
    for position, index in enumerate(both):
        if index in both[:position]:
            made = set(graph.nodes[index].writes)
            forward = order.forward[position + 1 :]
            in_forward = position < len(order.forward)
            crosses = in_forward and any(
                is_wanted(graph, d, forward, at_end=d in graph.outputs) for d in made
            )
            assert crosses or any(is_wanted(graph, d, both[position + 1 :]) for d in made)


def is_wanted(graph: CDGraph, data: int, rest: tuple[int, ...], at_end: bool = False) -> bool:
    for index in rest:
        if data in graph.nodes[index].reads:
            return True
        if data in graph.nodes[index].writes:
            return False
    return at_end


def test_held_and_pinned_results_are_not_made_again() -> None:
    draft = Draft()
    x = draft.add_data(DataKind.INPUT, 1)
    held = draft.add_data(DataKind.ACTIVATION, 4)
    other = draft.add_data(DataKind.ACTIVATION, 4)
    draft.add_node(Phase.FORWARD, [x], [held], time_ns=1)
    draft.add_node(Phase.FORWARD, [held], [other], time_ns=1)
    gradient = draft.add_data(DataKind.GRADIENT, 1)
    draft.add_node(Phase.BACKWARD, [held, other], [gradient], time_ns=1)
    order = Orders((0, 1), (0, 1, 2))
    assert without(draft.finish((other,), (held,)), order) == Orders((0, 1), (1, 2))
    assert without(draft.finish((other,)), order, {held}) == Orders((0, 1), (1, 2))
    assert without(draft.finish((other,)), order) == order


# Stitching


def test_stitch_maps_options_and_splits_phases() -> None:
    """Two blocks, the first run twice: forward only, then around nothing."""
    graph, blocks = join(gpt_problems(0))
    found = families(blocks)
    operations: list[Operation] = [
        RunForward(0),
        RunOption(1, 0, Phase.FORWARD),
        RunOption(1, 0, Phase.BACKWARD),
        RunOption(0, 0, Phase.FORWARD),
        RunOption(0, 0, Phase.BACKWARD),
    ]
    schedule = stitch(graph, blocks, found, operations)
    verify(graph, schedule)
    names = [graph.nodes[n].name for n in schedule.computes]
    assert names[:6] == ["embedding", "dropout", "norm", "logits", "log_softmax", "nll"]
    # The mask alone is wanted: dropout runs again, and so does what it reads.
    assert names[-4:] == ["embedding", "dropout", "dropout.backward", "embedding.backward"]
    assert len(names) == len(graph.nodes) + 2
    forward = schedule.events[: schedule.forward_length]
    assert sum(isinstance(e, Compute) for e in forward) == 6


def test_storages_that_skip_blocks_are_pinned() -> None:
    """A mask made in block 0 and read in blocks 1 and 2 is never made again."""
    draft = Draft()
    x = draft.add_data(DataKind.INPUT, 4)
    mask = draft.add_data(DataKind.ACTIVATION, 4)
    draft.add_node(Phase.FORWARD, [x], [mask], time_ns=1, name="mask")
    activations = [x]
    for k in range(3):
        activations.append(draft.add_data(DataKind.ACTIVATION, 4))
        draft.add_node(Phase.FORWARD, [activations[k], mask], [activations[-1]], time_ns=1)
    gradient = draft.add_data(DataKind.TANGENT, 4)
    for k in reversed(range(3)):
        outgoing = draft.add_data(DataKind.GRADIENT, 4)
        reads = [gradient, mask, activations[k], activations[k + 1]]
        draft.add_node(Phase.BACKWARD, reads, [outgoing], time_ns=1)
        gradient = outgoing
    graph = draft.finish((activations[-1],))
    slices = [((0, 1), (6,)), ((2,), (5,)), ((3,), (4,))]
    problem = CDGraph((), (), ())
    blocks = [
        Block(k, f, b, activations[k] if k else None, activations[k + 1], problem, "", 4, 4)
        for k, (f, b) in enumerate(slices)
    ]
    assert pinned_storages(graph, blocks) == {mask}
    order = Orders((0, 1, 2, 3), (0, 1, 4, 0, 1, 5, 0, 1, 6))
    dropped = without(graph, order, {mask})
    assert Counter((*dropped.forward, *dropped.backward))[0] == 1


@pytest.mark.parametrize("seed", range(12))
def test_chain_never_underestimates(seed: int) -> None:
    """Where nothing lives outside the blocks (held outputs, generator states, results that
    cannot be had again), the simulated peak is within the limit that the sequence was made for."""
    rng = random.Random(seed)
    ranges = Ranges(pinned_percent=0, max_rng_state_bytes=0)
    graph, blocks = random_chain(rng, tuple(rng.randint(1, 3) for _ in range(4)), ranges)
    graph = replace(graph, held=())
    last = replace(blocks[-1], problem=replace(blocks[-1].problem, held=last_gradients(blocks)))
    blocks = (*blocks[:-1], last)
    found = families(blocks)
    segments = intern_segments(links(blocks, found))
    needs = minimum_needs(segments)
    least_bytes = int(needs[segments.whole])
    top_bytes = max(least_bytes, fastest_need(segments))
    table = solve(segments, grid(top_bytes, top_bytes), needs)
    for limit in range(least_bytes, top_bytes + 1):
        schedule = stitch(graph, blocks, found, decode(table, limit))
        assert simulate(graph, schedule).peak_bytes <= limit


def last_gradients(blocks: tuple[Block, ...]) -> tuple[int, ...]:
    """What the last block hands to the one before, without an output that is held."""
    problem = blocks[-1].problem
    return tuple(d for d in problem.held if problem.data[d].kind is DataKind.GRADIENT)


# Budgets


def test_the_chain_has_a_schedule_only_with_time() -> None:
    graph, blocks, found = generated(0)
    hurried, patient = (ChainSolver(graph, blocks, found) for _ in range(2))
    budget_bytes = patient.minimum_bytes
    assert budget_bytes < simulate(graph, keep_all(graph)).peak_bytes
    late = time.process_time() - 1
    assert hurried.thriftiest(deadline=late) is None
    assert hurried.best_schedule(budget_bytes, deadline=late) is None
    assert hurried.best_schedule(budget_bytes) == patient.best_schedule(budget_bytes)
    # What is known is no longer waited for.
    assert hurried.best_schedule(budget_bytes, deadline=late) is not None


@pytest.mark.parametrize("seed", range(12))
def test_schedules_are_legal_within_their_budget(seed: int) -> None:
    graph, blocks, found = generated(seed)
    everything = simulate(graph, keep_all(graph))
    solver = ChainSolver(graph, blocks, found)
    assert solver.minimum_bytes <= everything.peak_bytes
    smallest = solver.best_schedule(solver.minimum_bytes)
    assert smallest is not None
    assert simulate(graph, smallest).peak_bytes == solver.minimum_bytes
    span = range(max(solver.minimum_bytes - 2, 0), everything.peak_bytes + 2)
    for budget_bytes in random.Random(seed).sample(span, min(len(span), 12)):
        schedule = solver.best_schedule(budget_bytes)
        if schedule is None:
            assert budget_bytes < solver.minimum_bytes
            continue
        verify(graph, schedule)
        simulation = simulate(graph, schedule)
        assert simulation.peak_bytes <= budget_bytes
        assert simulation.time_ns >= everything.time_ns
    assert solver.best_schedule(everything.peak_bytes) == keep_all(graph)


def test_answers_do_not_depend_on_earlier_questions() -> None:
    graph, blocks = join(gpt_problems(2))
    found = families(blocks, 8192)
    peak_bytes = simulate(graph, keep_all(graph)).peak_bytes
    budgets = [peak_bytes * share // 100 for share in (42, 55, 70)]
    solver = ChainSolver(graph, blocks, found)
    for share in range(30, 100, 5):
        solver.best_schedule(peak_bytes * share // 100)
    backwards = [solver.best_schedule(b) for b in reversed(budgets)]
    fresh = [ChainSolver(graph, blocks, found).best_schedule(b) for b in budgets]
    assert fresh == backwards[::-1]
    assert None not in fresh


@pytest.mark.parametrize("seed", range(25))
def test_never_beats_all_schedules_of_a_tiny_graph(seed: int) -> None:
    """Against the optimum over every legal schedule of the whole graph: no budget is met that
    cannot be, no time is claimed that nothing reaches."""
    rng = random.Random(seed)
    graph, blocks = random_chain(rng, (2, 1, 1), Ranges(max_rng_state_bytes=0, pinned_percent=0))
    solver = ChainSolver(graph, blocks, families(blocks))
    below = Exhaustive(graph, solver.minimum_bytes, None, is_free=True).fastest_ns()
    schedule = solver.best_schedule(solver.minimum_bytes)
    assert below is not None and schedule is not None
    assert simulate(graph, schedule).time_ns >= below


def test_memory_of_a_transformer_falls_for_little_time() -> None:
    """Six layers with attention written out: the layers' own recomputation, priced by roofline,
    takes a third of an iteration if nothing is kept (`torch.utils.checkpoint` per layer)."""
    graph, blocks = join(gpt_problems(6))
    found = families(blocks, 8192)
    everything = simulate(graph, keep_all(graph))
    solver = ChainSolver(graph, blocks, found)
    overheads = []
    for percent in (25, 50, 75):
        schedule = solver.best_schedule(everything.peak_bytes * percent // 100)
        assert schedule is not None
        overheads.append(simulate(graph, schedule).time_ns / everything.time_ns - 1)
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[1] < 0.08 < overheads[0] < 0.25
    assert solver.minimum_bytes < everything.peak_bytes * 0.2


def test_every_read_follows_its_producer() -> None:
    """Guards `generated` itself: chains whose blocks cover every node once, in order."""
    for seed in range(30):
        graph, blocks, _ = generated(seed)
        assert [n for b in blocks for n in b.forward] == [n.index for n in graph.forward]
        backward = [n for b in reversed(blocks) for n in b.backward]
        assert backward == [n.index for n in graph.backward]
        made = producers(graph)
        assert all(b.output in made for b in blocks)


def test_storages_freed_but_not_made_count_less() -> None:
    """The input of a block, which is alive before a run of it."""
    draft = Draft()
    given, made = (draft.add_data(DataKind.ACTIVATION, size) for size in (4, 3))
    draft.add_node(Phase.FORWARD, [given], [made], time_ns=1)
    graph = draft.finish((made,))
    schedule = with_frees(graph, (0,), ())
    assert [(s.during_bytes, s.after_bytes) for s in timeline(graph, schedule)] == [
        (3, 3),
        (3, -1),
        (-1, -4),
    ]
