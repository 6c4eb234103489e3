"""A backend of torch.compile: each graph that Dynamo captures is planned.

    torch.compile(model, backend="rockplan", fullgraph=True, options={"budget": "20GiB"})

Dynamo guards the calls: it captures another graph where Python would do something else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.symbolic_convert import InstructionTranslator

from rockplan.api import solve
from rockplan.budget import parse_budget
from rockplan.errors import InvalidBudget, InvalidInput
from rockplan.options import Options
from rockplan.python_state.distributed import is_fake


def backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Return a function like `graph_module` whose first call in training is planned.

    options: `budget` (as for `rockplan.solve`, 'auto' by default), `optimizer`, and fields of
    `rockplan.Options`. A budget in bytes, or 'auto', is one for a whole step, and InvalidBudget
    without fullgraph=True; a share, or 'min', is one of each graph. mode: none is accepted.
    """
    if mode is not None:
        raise InvalidInput(f"the backend of rockplan has no mode {mode!r}: leave it out")
    given = dict(options or {})
    budget = parse_budget(given.pop("budget", "auto"))
    optimizer = given.pop("optimizer", None)
    unknown = sorted(set(given) - set(Options.__dataclass_fields__))
    if unknown:
        raise InvalidInput(
            f"options={{{unknown[0]!r}: ...}} is none of rockplan's: 'budget', 'optimizer', and "
            "fields of rockplan.Options"
        )
    if any(map(is_fake, filter(torch.is_tensor, example_inputs))):
        raise InvalidInput(
            "the backend of rockplan got tensors without memory, as of DistributedDataParallel "
            "that is compiled as a whole: wrap what is compiled, "
            "DistributedDataParallel(torch.compile(model, backend='rockplan'))"
        )
    chosen = Options(**given)
    is_of_each_graph = budget.share is not None or budget.is_minimum
    if not (is_of_each_graph or _is_whole()):
        raise InvalidBudget(
            "a budget in bytes, or 'auto', is one for a whole step, and Dynamo may break this "
            "function into several graphs: pass fullgraph=True to torch.compile, which says where, "
            "or a share, such as options={'budget': '50%'}, which is one of each graph"
        )
    module, held, given_positions = _with_state(graph_module, example_inputs)
    planned = solve(module, budget=budget, optimizer=optimizer, options=chosen)

    def run(*inputs: Any) -> Any:
        for name, position in held.items():
            if getattr(planned, name) is not inputs[position]:
                setattr(planned, name, inputs[position])
        return planned(*(inputs[position] for position in given_positions))

    return run


def _is_whole() -> bool:
    try:
        return bool(InstructionTranslator.current_tx().one_graph)
    except AttributeError:
        return False


def _with_state(
    given: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[fx.GraphModule, dict[str, int], list[int]]:
    """The copy holds parameters and buffers, and asks tensors for their sizes, all of which Dynamo
    passes as arguments. Returns also name -> position of what it holds, and remaining positions."""
    module = fx.GraphModule(given, copy.deepcopy(given.graph))  # Dynamo reads its own again
    type(module).__qualname__ = "graph of torch.compile"
    held: dict[str, int] = {}
    remaining: list[int] = []
    placeholders = module.graph.find_nodes(op="placeholder")
    sizes: dict[Any, tuple[fx.Node, int]] = {}
    for node, tensor in zip(placeholders, inputs, strict=True):
        if isinstance(tensor, torch.Tensor):
            for dimension, size in enumerate(node.meta["example_value"].shape):
                if isinstance(size, torch.SymInt):
                    sizes.setdefault(size.node.expr, (node, dimension))
    first = module.graph.find_nodes(op="placeholder")[-1].next
    for position, (node, own) in enumerate(zip(placeholders, inputs, strict=True)):
        of = sizes.get(own.node.expr) if isinstance(own, torch.SymInt) else None
        with module.graph.inserting_before(first):
            if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"):
                held[node.name] = position
                if isinstance(own, nn.Parameter):
                    module.register_parameter(node.name, own)
                else:
                    module.register_buffer(node.name, own)
                new = module.graph.get_attr(node.name)
            elif of is not None:
                new = module.graph.call_method("size", of)
            else:
                remaining.append(position)
                continue
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
    module.recompile()
    return module, held, remaining
