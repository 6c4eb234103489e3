"""The command line: one file for each command, in the order of the help.

Results go to stdout, as tables or with --json as one JSON document; progress, warnings, errors and
output of the user's code go to stderr. torch is imported only by commands that need a model or an
operator.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from rockplan.cli import blocks, cache, compare, fit, plot, profile, show, solve
from rockplan.cli.ending import EXIT_CODES, ExitCode

app = typer.Typer(
    name="rockplan",
    help="Plan rematerialization of a PyTorch module under a byte budget.\n\n"
    "MODEL is 'module:factory' or 'file.py:factory'; the factory takes nothing and returns "
    "(model, sample_input) or (model, args, kwargs).",
    epilog=EXIT_CODES.replace("\n", " ").strip(),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


# In the order of the help.
app.command(epilog=profile.EXAMPLE)(profile.profile)
app.command(epilog=fit.EXAMPLE)(fit.fit)
app.command(epilog=solve.EXAMPLE)(solve.solve)
app.command(epilog=blocks.EXAMPLE)(blocks.blocks)
app.command(epilog=show.EXAMPLE)(show.show)
app.command(epilog=compare.EXAMPLE)(compare.compare)
app.command(epilog=plot.EXAMPLE)(plot.plot)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command line and exit with its code; if interrupted, end without waiting for solvers
    that are still busy."""
    try:
        app()
    except (SystemExit, OSError) as end:
        if getattr(end, "filename", None) is not None:
            raise  # an error of another file than stdout
        code = _flushed(end)
        if code == ExitCode.INTERRUPTED:
            sys.stderr.flush()
            os._exit(ExitCode.INTERRUPTED)
        raise SystemExit(code) from None


def _flushed(end: SystemExit | OSError) -> Any:
    """Flush stdout and return the exit code of a command that ended with `end`. A reader that went
    away (`| head`) gives 0; a stdout that cannot be written is an error of usage."""
    error = end if isinstance(end, OSError) else None
    if isinstance(end.__context__, BrokenPipeError):
        error = end.__context__
    try:
        sys.stdout.flush()
    except OSError as unwritable:
        error = unwritable
    if error is None:
        assert isinstance(end, SystemExit)
        return end.code
    # Keep Python from writing the rest at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    typer.echo(f"rockplan: stdout cannot be written: {error.strerror}", err=True)
    return ExitCode.USAGE
