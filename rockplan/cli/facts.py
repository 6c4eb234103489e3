"""`rockplan facts`: what a plan knows of an operator, from its schema and its row."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rockplan.cli import display
from rockplan.cli.arguments import Json
from rockplan.cli.ending import ending

EXAMPLE = "Example: rockplan facts aten.native_dropout"

Operator = Annotated[
    str, typer.Argument(metavar="OP", help="aten.add.Tensor, aten.add, add, or cond.")
]


def facts(operator: Operator, as_json: Json = False) -> None:
    """What a plan knows of the operator OP of PyTorch: its schema's facts, and its row's."""
    with ending(as_json):
        from rockplan.graph_builder.operators.facts import facts_of, operators_named

        rows = [facts_of(one) for one in operators_named(operator)]
    if as_json:
        display.print_json({"operators": [asdict(one) for one in rows]})
        return
    print("\n".join(map(str, rows)))
