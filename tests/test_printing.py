"""Prints of graphs, schedules, blocks and programs: one line an item, word for word."""

from __future__ import annotations

from dataclasses import replace

from rockplan.oracles.simulate import simulate
from rockplan.python_state import trees
from rockplan.runtime.program import build_program
from rockplan.values.block import Block
from rockplan.values.graph import Takeover
from rockplan.values.interface import Interface, OutputLeaf
from rockplan.values.plan import Certificate, Plan, Status
from rockplan.values.schedule import with_frees
from testing.graphs import gelu_of_product

GRAPH = gelu_of_product()
SCHEDULE = with_frees(GRAPH, (0, 1), (0, 2, 3))
"""The product is computed again for the gradient of gelu."""

GRAPH_TEXT = """
4 nodes, 850 ns; outputs y; tangents g_y; held y; handed g_w
0  forward   mul_0            w, x -> h      64 B  100 ns
1  forward   gelu_0           h -> y         64 B  250 ns  in act
2  backward  gelu_backward_0  h, g_y -> g_h  64 B  400 ns  workspace 16 B, in act
3  backward  mul_1            x, g_h -> g_w  64 B  100 ns
"""

REMARKS_TEXT = """
4 nodes, 850 ns; outputs y; tangents g_y; held y; handed g_w; dropped h
0  forward   mul_0            w, x -> h      64 B  100 ns  random, runs once
1  forward   gelu_0           h -> y         64 B  250 ns  takes h, in act
2  backward  gelu_backward_0  h, g_y -> g_h  64 B  400 ns  workspace 16 B, in act
3  backward  mul_1            x, g_h -> g_w  64 B  100 ns
"""

SCHEDULE_TEXT = """
0  forward   compute  0
1  forward   compute  1
2  forward   free     2
3  backward  compute  0  again
4  backward  compute  2
5  backward  free     2
6  backward  free     4
7  backward  compute  3
8  backward  free     5
9  backward  free     6
"""

BLOCK_TEXT = """
block1: forward 4..5, backward 8, 11; input 3, output 9; incoming gradients 64 B, background 32 B
"""

PROGRAM_TEXT = """
residents[0]  parameter w  torch.float32 (4, 4)
residents[1]  input 0      torch.float32 (4, 4)
results[0]    leaf 0       gradient in strides (4, 1)
backward_0    hands over   parameter w

def forward(frame):
    # (root)  model.py:3
    w = frame.residents[0]
    x = frame.residents[1]
    h = aten_mul_Tensor(w, x)
    # act  model.py:4
    y = aten_gelu(h)
    del h
    return (y,)


def backward_0(frame):
    (g_y,) = frame.take_tangents()
    # (root)  model.py:3  [recomputed]
    w = frame.residents[0]
    x = frame.residents[1]
    h = aten_mul_Tensor(w, x)
    # act  model.py:4
    g_h = aten_gelu_backward(g_y, h)
    del h, g_y
    # (root)  model.py:3
    g_w = aten_mul_Tensor(g_h, x)
    del g_h
    return (g_w,)
"""


def test_a_graph_is_a_line_a_node() -> None:
    assert str(GRAPH) == GRAPH_TEXT.strip()


def test_a_nodes_particulars_are_behind_it() -> None:
    mul, gelu, *backward = GRAPH.nodes
    nodes = (
        replace(mul, random=True, recomputable=False),
        replace(gelu, takes=(Takeover((2,), gelu.writes, gelu.calls[0]),)),
        *backward,
    )
    assert str(replace(GRAPH, nodes=nodes, dropped=(2,))) == REMARKS_TEXT.strip()


def test_a_graph_without_nodes_is_its_first_line() -> None:
    assert str(replace(GRAPH, nodes=())) == GRAPH_TEXT.strip().splitlines()[0].replace(
        "4 nodes, 850 ns", "0 nodes, 0 ns"
    )


def test_a_schedule_is_a_line_an_event() -> None:
    assert str(SCHEDULE) == SCHEDULE_TEXT.strip()


def test_a_block_is_its_place_and_its_problem() -> None:
    block = Block(1, (4, 5), (8, 11), 3, 9, GRAPH, "", 64, 32, "block1")
    assert str(block) == f"{BLOCK_TEXT.strip()}\n{GRAPH_TEXT.strip()}"


def test_programs_print_arguments_results_and_code() -> None:
    leaf = OutputLeaf(3, None, 0, (), 4, True)
    interface = Interface(
        parameters=(("w", 0),),
        buffers=(),
        inputs=((0, 1),),
        constants=(),
        outputs=(leaf,),
        gradients=((0, (6,)),),
        copies=(),
        mutated=(),
        guards=(),
        questions=(),
        backward_ignores_autocast=True,
    )
    simulation = simulate(GRAPH, SCHEDULE)
    plan = Plan(
        graph=GRAPH,
        schedule=SCHEDULE,
        blocks=(),
        budget_bytes=simulation.peak_bytes,
        peak_bytes=simulation.peak_bytes,
        saved_bytes=simulation.saved_bytes,
        time_ns=simulation.time_ns,
        eager_peak_bytes=simulation.peak_bytes,
        eager_time_ns=GRAPH.time_ns,
        certificate=Certificate(Status.FEASIBLE, simulation.time_ns, GRAPH.time_ns),
        graph_digest="four nodes",
        profile_digest="",
        profile_source="by hand",
        torch_version="",
    )
    _, output_spec = trees.tree_flatten(None)
    program = build_program(plan, interface, (), output_spec)
    assert str(program) == PROGRAM_TEXT.strip() + "\n"
