"""How a command ends: a result, or a message with an exit code.

Output of the user's code inside `ending` goes to stderr, as warnings and errors do; stdout is for
the result.
"""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from enum import IntEnum

import typer

from rockplan import errors
from rockplan.cli.display import print_json, printable


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

# Seconds after which an interrupt is raised again, in case Python dropped it (in a destructor, or
# in an import inside try).
_RAISE_AGAIN_S = 0.5


@contextmanager
def _interruptible() -> Iterator[None]:
    """Python may drop the first interrupt, or turn it into another error (as before 3.12 in the
    body of a class): it comes again. Only in the main thread; signal handlers are put back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    struck = False

    def interrupt(*_: object) -> None:
        nonlocal struck
        struck = True
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, _RAISE_AGAIN_S)
        raise KeyboardInterrupt

    kinds = [k for k in (signal.SIGINT, getattr(signal, "SIGALRM", None)) if k is not None]
    before = {kind: signal.signal(kind, interrupt) for kind in kinds}
    try:
        yield
    except Exception as error:
        if struck:
            raise KeyboardInterrupt from error
        raise
    finally:
        # Ignore interrupts first, so that none strikes while the former handlers are put back.
        for kind in kinds:
            signal.signal(kind, signal.SIG_IGN)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, handler in before.items():
            # None: the handler was not set by Python, which cannot put it back.
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)


@contextmanager
def ending(as_json: bool) -> Iterator[None]:
    """End the command if the `with` block raises: print an error of rockplan or of a file to
    stderr, with as_json also as a document to stdout, and exit with its code. Output of the user's
    own code inside goes to stderr: stdout is for the result."""
    try:
        with _interruptible(), warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.showwarning = lambda message, *_, **__: typer.echo(
                printable(f"warning: {message}"), err=True
            )
            yield
    except KeyboardInterrupt:
        typer.echo("interrupted; nothing was left half-written", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except (errors.RockplanError, OSError) as error:
        code = _exit_code(error)
        typer.echo(printable(f"rockplan: {error}"), err=True)
        if as_json:
            print_json({"error": {"type": type(error).__name__, "message": str(error)}})
        raise typer.Exit(code) from None


def _exit_code(error: Exception) -> ExitCode:
    match error:
        case errors.InfeasibleBudget():
            return ExitCode.INFEASIBLE
        case errors.PlanFormatError():
            return ExitCode.FILE
        case errors.CaptureError():
            return ExitCode.MODEL
        case errors.CheckFailed():
            return ExitCode.FAILED
        case errors.InvalidInput() | errors.MissingLibrary() | OSError():
            return ExitCode.USAGE
    raise error


def end_with_errors(solved: Iterable[object]) -> None:
    """End the command with its exit code if there are budgets among `solved` that are too small:
    the errors are printed."""
    failed = [one for one in solved if isinstance(one, errors.InfeasibleBudget)]
    for error in failed:
        typer.echo(f"rockplan: {error}", err=True)
    if failed:
        raise typer.Exit(ExitCode.INFEASIBLE)
