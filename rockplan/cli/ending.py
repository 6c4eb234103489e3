"""How a command ends: a result, or a message with an exit code.

Output of the user's code inside `ending` goes to stderr, as warnings and errors do; stdout is for
the result.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from enum import IntEnum

import typer

from rockplan.cli.display import print_json, printable
from rockplan.errors import (
    CaptureError,
    CheckFailed,
    InfeasibleBudget,
    InvalidInput,
    MissingLibrary,
    PlanFormatError,
    RockplanError,
)


class ExitCode(IntEnum):
    """Exit codes of a command; 0 is success, 1 a bug of rockplan (with a traceback)."""

    USAGE = 2
    INFEASIBLE = 3
    MODEL = 4
    FILE = 5
    FAILED = 6
    INTERRUPTED = 130


EXIT_CODES = """
Exit codes: 0 done; 1 a bug of rockplan; 2 the command, the budget or the factory cannot be used;
3 a budget (of compare: every budget) is below the minimum, which is printed; 4 the model cannot be
planned; 5 a plan file or a cache entry is damaged or of another version; 6 a check failed; 130
interrupted.
"""


@contextmanager
def ending(as_json: bool) -> Iterator[None]:
    """End the command if the `with` block raises: print an error of rockplan or of a file to
    stderr, with as_json also as a document to stdout, and exit with its code. Output of the user's
    own code inside goes to stderr: stdout is for the result."""
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.showwarning = lambda message, *_, **__: typer.echo(
                printable(f"warning: {message}"), err=True
            )
            yield
    except KeyboardInterrupt:
        typer.echo("interrupted; nothing was left half-written", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except (RockplanError, OSError) as error:
        code = _exit_code(error)
        typer.echo(printable(f"rockplan: {error}"), err=True)
        if as_json:
            print_json({"error": {"type": type(error).__name__, "message": str(error)}})
        raise typer.Exit(code) from None


def _exit_code(error: Exception) -> ExitCode:
    match error:
        case InfeasibleBudget():
            return ExitCode.INFEASIBLE
        case PlanFormatError():
            return ExitCode.FILE
        case CaptureError():
            return ExitCode.MODEL
        case CheckFailed():
            return ExitCode.FAILED
        case InvalidInput() | MissingLibrary() | OSError():
            return ExitCode.USAGE
    raise error


def end_with_errors(solved: Iterable[object]) -> None:
    """End the command with its exit code if there are budgets among `solved` that are too small:
    the errors are printed."""
    errors = [one for one in solved if isinstance(one, InfeasibleBudget)]
    for error in errors:
        typer.echo(f"rockplan: {error}", err=True)
    if errors:
        raise typer.Exit(ExitCode.INFEASIBLE)
