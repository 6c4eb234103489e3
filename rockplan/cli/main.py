"""The command line: `rockplan profile|solve|compare|show|plot|cache`.

Results go to stdout, as tables or with --json as one JSON document; progress, warnings, errors and
what the user's code prints go to stderr. torch is imported only by commands that need a model.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import rockplan
from rockplan.cli import display
from rockplan.cli.factory import Subject, make_subject
from rockplan.errors import (
    CaptureError,
    CheckFailed,
    InfeasibleBudget,
    InvalidInput,
    MissingLibrary,
    PlanFormatError,
    RockplanError,
)
from rockplan.options import Options
from rockplan.reports import html, pictures, timeline
from rockplan.reports.explain import wrapped
from rockplan.reports.progress_bars import waiting
from rockplan.store.cache import KINDS, Cache, Entry, default_folder
from rockplan.store.plan_file import write_whole
from rockplan.values.curve import Curve
from rockplan.values.measured_timeline import MeasuredTimeline
from rockplan.values.plan import Plan, format_bytes


class ExitCode(IntEnum):
    """How a command ends; 0 is success, 1 a bug of rockplan (with a traceback)."""

    USAGE = 2
    INFEASIBLE = 3
    MODEL = 4
    FILE = 5
    FAILED = 6
    INTERRUPTED = 130


_EXIT_CODES = """
Exit codes: 0 done; 1 a bug of rockplan; 2 the command, the budget or the factory cannot be used;
3 a budget (of compare: every budget) is below the minimum, which is printed; 4 the model cannot be
planned; 5 a plan file or a cache entry is damaged or of another version; 6 a check failed; 130
interrupted.
"""

app = typer.Typer(
    name="rockplan",
    help="Plan rematerialization of a PyTorch module under a byte budget.\n\n"
    "MODEL is 'module:factory' or 'file.py:factory'; the factory takes nothing and returns "
    "(model, sample_input) or (model, args, kwargs).",
    epilog=_EXIT_CODES.replace("\n", " ").strip(),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(
    help="Look after profiles, options and plans that are kept on disk "
    "(ROCKPLAN_CACHE_DIR, else the platform's cache folder).",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(cache_app, name="cache")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="module:factory or file.py:factory")]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        "-b",
        metavar="BUDGET",
        help="Bytes, 2GB, 1.5GiB, 40% of the unplanned peak, min, or on CUDA auto or auto-4GB; "
        "may be repeated.",
    ),
]
Source = Annotated[
    str, typer.Argument(metavar="PLAN|MODEL", help="A file that solve --save wrote, or MODEL.")
]
Budget = Annotated[
    str | None, typer.Option("--budget", "-b", metavar="BUDGET", help="For a MODEL.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Autocast = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="Plan under torch.autocast with this dtype, e.g. bfloat16."),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Read and keep nothing on disk.")]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=0.0,
        help="For each plan, after the model is captured and measured; the best plan found so far "
        "is used. A curve is made of some 16 plans.",
    ),
]
Kinds = Annotated[
    list[str] | None, typer.Argument(metavar="[KIND]...", help=f"Any of {', '.join(KINDS)}.")
]


# Ends


# Seconds after which an interrupt is raised again that Python dropped, as it does in a destructor
# or in an import that is only tried.
_AGAIN_S = 0.5


@contextmanager
def _interruptible() -> Iterator[None]:
    """An interrupt ends what runs inside, even if it is dropped where it strikes, or turned into
    another error there (Python before 3.12 does that in the body of a class)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    struck = False

    def interrupt(*_: object) -> None:
        nonlocal struck
        struck = True
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
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
        # Ignored first, so that none strikes while the handlers of before are put back.
        for kind in kinds:
            signal.signal(kind, signal.SIG_IGN)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, handler in before.items():
            # None: it was not set by Python, which cannot put it back.
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _ending(as_json: bool) -> Iterator[None]:
    """Turns what may go wrong into a message, a JSON document if wanted, and an exit code.

    What is printed inside, by the user's own code, goes to stderr: stdout is for the result.
    """
    try:
        with _interruptible(), warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.showwarning = _show_warning
            yield
    except KeyboardInterrupt:
        typer.echo("interrupted; nothing was left half-written", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except (RockplanError, OSError) as error:
        code = _exit_code(error)
        typer.echo(display.printable(f"rockplan: {error}"), err=True)
        if as_json:
            _print_json({"error": {"type": type(error).__name__, "message": str(error)}})
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


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    typer.echo(display.printable(f"warning: {message}"), err=True)


def _print_json(document: object) -> None:
    print(json.dumps(document, indent=2))


# Models

_AUTOCAST_DTYPES = ("bfloat16", "float16")


def _autocast(subject: Subject, dtype: str | None) -> AbstractContextManager[object]:
    if dtype is None:
        return nullcontext()
    if dtype not in _AUTOCAST_DTYPES:
        raise InvalidInput(f"--autocast {dtype}: write {' or '.join(_AUTOCAST_DTYPES)}")
    import torch

    kind = next((p.device.type for p in subject.model.parameters()), "cpu")
    return torch.autocast(kind, dtype=getattr(torch, dtype))


def _options(no_cache: bool, time_limit: float | None, check: bool = False) -> Options:
    options = Options(cache=not no_cache, check=check)
    if time_limit is None:
        return options
    return Options(cache=not no_cache, check=check, time_limit_s=time_limit)


@app.command(epilog="Example: rockplan profile rockplan.examples:transformer")
def profile(
    model: Model,
    top: Annotated[int, typer.Option(metavar="ROWS", min=1, help="Of each table.")] = 12,
    as_json: Json = False,
    autocast: Autocast = None,
    no_cache: NoCache = False,
) -> None:
    """Who owns the peak of MODEL, what is kept for its backward pass, and what that costs."""
    with _ending(as_json), waiting():
        subject = make_subject(model)
        with _autocast(subject, autocast):
            found = rockplan.plan(
                subject.model,
                subject.sample_input,
                "100%",
                sample_kwargs=subject.sample_kwargs,
                options=_options(no_cache, None),
            )
        explanation = rockplan.explain(found, unplanned=True)
        found = display.kept_whole(found)
    modules, operators = display.shares_by_module(found), display.shares_by_operator(found)
    if as_json:
        row = display.plan_row("100%", found)
        facts = ("eager_peak_bytes", "eager_time_ns", "saved_bytes", "operations")
        sources = ("graph_digest", "profile_digest", "profile_source", "torch_version")
        _print_json(
            {
                "model": model,
                **{name: row[name] for name in (*facts, *sources)},
                "modules": [display.share_row(s) for s in modules],
                "operators": [display.share_row(s) for s in operators],
                "explanation": explanation.as_json(),
            }
        )
        return
    facts_text = (
        f"{len(found.graph.nodes)} operations, {display.milliseconds(found.eager_time_ns)} "
        f"forward and backward, peak {format_bytes(found.eager_peak_bytes)}, of which "
        f"{format_bytes(found.saved_bytes)} are kept between forward and backward"
    )
    counted = "bytes beyond parameters, buffers, inputs and .grad"
    source = [*wrapped(found.profile_source), counted]
    lines = [*wrapped(facts_text), *source, "", str(explanation), ""]
    print(display.printable("\n".join(lines)))
    display.show_shares("module", modules, top)
    print()
    display.show_shares("operator", operators, top)


@app.command(epilog="Example: rockplan solve rockplan.examples:transformer -b 40% -b min")
def solve(
    model: Model,
    budget: Budgets = None,
    save: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File for the plan, which rockplan.load reads; for several budgets a name "
            "with {budget} in it.",
        ),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File for the plan as torch.utils.checkpoint code that needs no rockplan; its "
            "head says what is lost.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(help="Run a step of both modules, compare bit for bit, refuse a difference."),
    ] = False,
    as_json: Json = False,
    autocast: Autocast = None,
    time_limit: TimeLimit = None,
    no_cache: NoCache = False,
) -> None:
    """Plan MODEL under each budget; without a budget, the whole curve of memory and time."""
    with _ending(as_json), waiting():
        _check_save("--save", save, budget or [])
        _check_save("--export", export, budget or [])
        subject = make_subject(model)
        options = _options(no_cache, time_limit, check)
        with _autocast(subject, autocast):
            curve = None if budget else _curve(subject, options)
            found = _plans(subject, budget, options) if budget else ()
        pairs = tuple(zip(budget or (), found, strict=True))
        files = [_save(save, asked, plan) for asked, plan in pairs]
        exported = [_export(export, asked, plan, subject) for asked, plan in pairs]
    if curve is not None:
        _show_curve(model, curve, as_json)
        return
    _show_solved(model, [asked for asked, _ in pairs], found, files, exported, as_json)
    errors = [plan for plan in found if isinstance(plan, InfeasibleBudget)]
    for error in errors:
        typer.echo(f"rockplan: {error}", err=True)
    if errors:
        raise typer.Exit(ExitCode.INFEASIBLE)


def _plans(
    subject: Subject, budgets: list[str], options: Options
) -> tuple[Plan | InfeasibleBudget, ...]:
    from rockplan.api import plan_each

    sample, kwargs = subject.sample_input, subject.sample_kwargs
    found = plan_each(subject.model, sample, budgets, sample_kwargs=kwargs, options=options)
    return tuple(
        _checked(subject, asked, options) if options.check and isinstance(plan, Plan) else plan
        for asked, plan in zip(budgets, found, strict=True)
    )


def _checked(subject: Subject, budget: str, options: Options) -> Plan:
    """The plan with the record of its check."""
    planned = rockplan.solve(
        subject.model,
        subject.sample_input,
        budget,
        sample_kwargs=subject.sample_kwargs,
        options=options,
    )
    return rockplan.plan_of(planned)


def _check_save(option: str, name: str | None, budgets: list[str]) -> None:
    if name is None:
        return
    if not budgets:
        raise InvalidInput(f"{option} needs a --budget to make a plan for")
    if len(budgets) > 1 and "{budget}" not in name:
        raise InvalidInput(
            f"{option} {name} would be written {len(budgets)} times; put {{budget}} into the name"
        )
    if not Path(name).name or Path(name).is_dir():
        raise InvalidInput(f"{option} '{name}' names no file; name the file to write")
    if not Path(name).parent.is_dir():
        raise InvalidInput(f"there is no folder {Path(name).parent} for {option} {name}")


def _save(save: str | None, asked: str, plan: Plan | InfeasibleBudget) -> str | None:
    if save is None or isinstance(plan, InfeasibleBudget):
        return None
    path = _file_name(save, asked)
    rockplan.save_plan(plan, path)
    return path


def _export(
    export: str | None, asked: str, plan: Plan | InfeasibleBudget, subject: Subject
) -> str | None:
    if export is None or isinstance(plan, InfeasibleBudget):
        return None
    path = _file_name(export, asked)
    write_whole(Path(path), rockplan.as_checkpoint_code(subject.model, plan))
    return path


def _file_name(name: str, asked: str) -> str:
    return name.replace("{budget}", asked.replace("%", "pct"))


def _curve(subject: Subject, options: Options) -> Curve:
    return rockplan.pareto(
        subject.model,
        subject.sample_input,
        sample_kwargs=subject.sample_kwargs,
        options=options,
    )


def _show_curve(model: str, curve: Curve, as_json: bool) -> None:
    if as_json:
        _print_json({"model": model, "curve": display.curve_row(curve)})
    else:
        print(display.printable(str(curve)))


def _show_solved(
    model: str,
    budgets: list[str],
    found: tuple[Plan | InfeasibleBudget, ...],
    files: list[str | None],
    exported: list[str | None],
    as_json: bool,
) -> None:
    if as_json:
        rows = [
            display.infeasible_row(asked, plan)
            if isinstance(plan, InfeasibleBudget)
            else {**display.plan_row(asked, plan), "file": file, "exported": code}
            for asked, plan, file, code in zip(budgets, found, files, exported, strict=True)
        ]
        _print_json({"model": model, "plans": rows})
        return
    if len(found) == 1 and isinstance(found[0], Plan):
        print(display.printable(str(found[0])))
    else:
        display.show_plans(budgets, found)
    for file in (*files, *exported):
        if file is not None:
            typer.echo(f"written: {file}", err=True)


@app.command(epilog="Example: rockplan show rockplan.examples:mlp -b min --code")
def show(
    source: Source,
    budget: Budget = None,
    code: Annotated[bool, typer.Option("--code", help="The generated Python of a MODEL.")] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Who owns the peak, and what each recomputation buys."),
    ] = False,
    as_json: Json = False,
    autocast: Autocast = None,
    no_cache: NoCache = False,
) -> None:
    """Print a plan: what is kept, what is recomputed, at what cost."""
    with _ending(as_json), waiting():
        if _is_file(source):
            _check_of_file(budget is not None or code)
            plans, text = rockplan.read_plans(source), ""
        else:
            plans, text = _planned(source, budget, code, autocast, no_cache)
        explanations = [rockplan.explain(p) for p in plans] if explain else []
    if as_json:
        rows = [display.plan_row(f"{p.budget_bytes}", p) for p in plans]
        for row, explanation in zip(rows, explanations, strict=False):
            row["explanation"] = explanation.as_json()
        _print_json({"source": source, "plans": rows, **({"code": text} if code else {})})
    else:
        shown = [text] if code else map(str, explanations or plans)
        print(display.printable("\n\n".join(shown)))


def _check_of_file(has_more: bool) -> None:
    if has_more:
        raise InvalidInput("--budget and --code are for a MODEL, not for a plan file")


def _is_file(source: str) -> bool:
    return ":" not in source or Path(source).is_file()


def _planned(
    model: str, budget: str | None, code: bool, autocast: str | None, no_cache: bool
) -> tuple[tuple[Plan, ...], str]:
    """The plan of a model, and its generated code if that is wanted."""
    if budget is None:
        raise InvalidInput("a MODEL needs a --budget")
    subject = make_subject(model)
    make = rockplan.solve if code else rockplan.plan
    with _autocast(subject, autocast):
        made: Any = make(
            subject.model,
            subject.sample_input,
            budget,
            sample_kwargs=subject.sample_kwargs,
            options=_options(no_cache, None),
        )
    return ((rockplan.plan_of(made),), rockplan.code_of(made)) if code else ((made,), "")


# Pictures


class Picture(StrEnum):
    """What a picture shows."""

    MEMORY = "memory"
    CURVE = "curve"
    SCHEDULE = "schedule"
    GRAPH = "graph"


@app.command(epilog="Example: rockplan compare rockplan.examples:mlp -b 50% --rounds 3")
def compare(
    model: Model,
    budget: Budgets = None,
    compile_budget: Annotated[
        list[float] | None,
        typer.Option(
            metavar="RATIO",
            min=0.0,
            max=1.0,
            help="Also torch.compile with this activation_memory_budget; may be repeated.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each variant is timed.")] = 7,
    as_json: Json = False,
    autocast: Autocast = None,
    time_limit: TimeLimit = None,
    no_cache: NoCache = False,
) -> None:
    """Measure a step of MODEL: eager, PyTorch's checkpointing, and rockplan under each budget."""
    with _ending(as_json), waiting():
        subject = make_subject(model)
        with _autocast(subject, autocast):
            found = rockplan.compare(
                subject.model,
                subject.sample_input,
                *([budget] if budget else []),
                sample_kwargs=subject.sample_kwargs,
                compile_budgets=compile_budget or (),
                rounds=rounds,
                options=_options(no_cache, time_limit),
            )
    print(found.to_json() if as_json else display.printable(str(found)))
    is_planned = any(row.budget_bytes is not None for row in found.rows)
    if not is_planned and any(row.minimum_bytes is not None for row in found.rows):
        raise typer.Exit(ExitCode.INFEASIBLE)


@app.command(epilog="Example: rockplan plot rockplan.examples:mlp -b 50% --time-limit 2")
def plot(
    source: Source,
    budget: Budget = None,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=".html: a report in one file; .svg, .png: a picture; .json: a timeline for "
            "Perfetto; .dot: the graph for Graphviz.",
        ),
    ] = "rockplan.html",
    picture: Annotated[
        Picture | None, typer.Option(help="For .svg and .png, which have one; memory by default.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            help="Also run a MODEL, as it is, planned and with PyTorch's checkpointing, and draw "
            "what was measured; not for a model that does not fit."
        ),
    ] = True,
    autocast: Autocast = None,
    time_limit: TimeLimit = None,
    no_cache: NoCache = False,
) -> None:
    """Draw a plan; of a MODEL, beside what a step was measured to need, and every other budget."""
    with _ending(as_json=False), waiting():
        suffix = Path(output).suffix.lower()
        if suffix not in _DRAWN or not Path(output).parent.is_dir():
            raise InvalidInput(
                f"--output {output}: name a file in a folder that exists, with one "
                f"of the endings {', '.join(_DRAWN)}"
            )
        if picture is not None and suffix not in _OF_ONE:
            raise InvalidInput(
                f"--picture is for {' and '.join(_OF_ONE)}; a {suffix} file always holds the same"
            )
        chosen = picture or Picture.MEMORY
        if _is_file(source):
            _check_of_file(budget is not None)
            found = _Drawn(rockplan.read_plans(source)[0])
        elif budget is None:
            raise InvalidInput("a MODEL needs a --budget")
        else:
            subject = make_subject(source)
            with _autocast(subject, autocast):
                shown = _shown(suffix, chosen)
                options = _options(no_cache, time_limit)
                found = _drawn(subject, budget, shown, measure, options)
        path, note = _draw(found, Path(output), chosen)
    print(f"written: {path}{note and f' ({note})'}")


_OF_ONE = (".svg", ".png")
"""Endings of files that hold one picture."""

_DRAWN = (".html", *_OF_ONE, ".json", ".dot")

_ROUNDS = 5
"""Of the comparison on the curve: a mark in a picture needs less than a table."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A plan, and what is drawn beside it."""

    plan: Plan
    series: tuple[pictures.Series, ...] = ()
    measured: MeasuredTimeline | None = None
    eager_measured: MeasuredTimeline | None = None


def _shown(suffix: str, picture: Picture) -> frozenset[Picture]:
    """What a file of that ending has of the memory over time and the curve."""
    match suffix:
        case ".html":
            return frozenset({Picture.MEMORY, Picture.CURVE})
        case ".json":
            return frozenset({Picture.MEMORY})
        case ".dot":
            return frozenset()
    return frozenset({picture})


def _drawn(
    subject: Subject, budget: str, shown: frozenset[Picture], measure: bool, options: Options
) -> _Drawn:
    """The plan of a model with the other budgets and what was measured, as far as it is shown."""
    from rockplan.comparison import measured_series, measured_timelines

    model, sample = subject.model, subject.sample_input
    kwargs = subject.sample_kwargs
    planned = rockplan.solve(model, sample, budget, sample_kwargs=kwargs, options=options)
    series: tuple[pictures.Series, ...] = ()
    eager_measured = measured = None
    if Picture.CURVE in shown:
        curve = rockplan.pareto(model, sample, sample_kwargs=kwargs, options=options)
        series += (pictures.curve_series(curve),)
    if Picture.CURVE in shown and measure:
        found = rockplan.compare(
            model, sample, [budget], sample_kwargs=kwargs, rounds=_ROUNDS, options=options
        )
        series += measured_series(found)
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    if Picture.MEMORY in shown and measure and on_cpu:
        eager_measured, measured = measured_timelines(model, planned, sample, sample_kwargs=kwargs)
    return _Drawn(rockplan.plan_of(planned), series, measured, eager_measured)


def _draw(found: _Drawn, path: Path, picture: Picture) -> tuple[Path, str]:
    """Write a drawing; returns its file, and what to know about how it was made."""
    lines = {"measured": found.measured, "eager_measured": found.eager_measured}
    note = ""
    content: str | bytes
    match path.suffix.lower():
        case ".html":
            title, series = path.stem, found.series
            content = html.html_report(found.plan, title=title, series=series, **lines)
        case ".json":
            content = timeline.plan_trace(found.plan, **lines)
        case ".dot":
            content = pictures.graph_dot(found.plan)
        case suffix:
            drawn = _picture(found, picture, "png" if suffix == ".png" else "svg")
            content, note, path = drawn.data, drawn.note, path.with_suffix(drawn.suffix)
    write_whole(path, content)
    return path, note


def _picture(found: _Drawn, picture: Picture, kind: pictures.Format) -> pictures.Picture:
    plan = found.plan
    match picture:
        case Picture.MEMORY:
            lines = {"measured": found.measured, "eager_measured": found.eager_measured}
            data = pictures.draw_memory(plan, **lines, format=kind)
        case Picture.CURVE:
            data = pictures.draw_curve([*found.series, pictures.plan_series(plan)], format=kind)
        case Picture.SCHEDULE:
            data = pictures.draw_schedule(plan, format=kind)
        case Picture.GRAPH:
            return pictures.draw_graph(plan, format=kind)
    return pictures.Picture(data, f".{kind}")


# The cache


@cache_app.command("list", epilog="Example: rockplan cache list plan")
def cache_list(kinds: Kinds = None, as_json: Json = False) -> None:
    """What is kept: kind, name, size, age, and what it was made for."""
    with _ending(as_json):
        entries = _entries(kinds)
    if as_json:
        _print_json({"folder": str(default_folder()), "entries": list(map(_entry_row, entries))})
        return
    print(
        f"{default_folder()}: {len(entries)} entries, "
        f"{format_bytes(sum(e.size_bytes for e in entries))}"
    )
    if entries:
        rows = [
            [e.name[:16], e.kind, format_bytes(e.size_bytes), _age(e), e.problem or _for(e)]
            for e in entries
        ]
        display.show_table(["name", "kind", "size", "age", "made for"], rows, words=(0, 1, 4))


@cache_app.command("show", epilog="Example: rockplan cache show all")
def cache_show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The beginning of a name of cache list, or all.")
    ],
    as_json: Json = False,
) -> None:
    """What an entry depends on, and the plan if it is one."""
    with _ending(as_json):
        found = [e for e in _entries(None) if name == "all" or e.name.startswith(name)]
        if not found and name != "all":
            raise InvalidInput(f"no entry of {default_folder()} begins with {name!r}")
    if as_json:
        _print_json({"entries": list(map(_entry_row, found))})
        return
    if not found:
        print(f"{default_folder()}: 0 entries")
    for entry in found:
        print(display.printable(f"{entry.kind} {entry.name}\n  file  {entry.path}"))
        for fact, value in entry.key.items():
            print(display.printable(f"  {fact}  {value}"))
        if entry.problem:
            print(display.printable(f"  cannot be used: {entry.problem}"))
        elif entry.kind == "plan":
            print(display.printable(f"\n{rockplan.read_plans(entry.path)[0]}"))
        print()


@cache_app.command("clear", epilog="Example: rockplan cache clear plan options")
def cache_clear(kinds: Kinds = None, as_json: Json = False) -> None:
    """Delete entries, of all kinds or of some. Files that are not the cache's own stay."""
    with _ending(as_json):
        count, size_bytes = Cache(default_folder()).clear(_checked_kinds(kinds))
    if as_json:
        _print_json({"deleted": count, "bytes": size_bytes})
    else:
        print(f"deleted {count} files, {format_bytes(size_bytes)}, from {default_folder()}")


@cache_app.command("verify", epilog="Example: rockplan cache verify")
def cache_verify(as_json: Json = False) -> None:
    """Read and check every entry; name those that cannot be used."""
    with _ending(as_json):
        entries = _entries(None)
    damaged = [e for e in entries if e.problem]
    if as_json:
        _print_json({"entries": len(entries), "damaged": list(map(_entry_row, damaged))})
    else:
        for entry in damaged:
            print(display.printable(f"{entry.path}: {entry.problem}"))
        print(f"{len(entries) - len(damaged)} entries are good, {len(damaged)} are not")
    if damaged:
        raise typer.Exit(ExitCode.FILE)


def _checked_kinds(kinds: list[str] | None) -> tuple[str, ...]:
    unknown = set(kinds or ()) - set(KINDS)
    if unknown:
        raise InvalidInput(
            f"no kind of entry: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}"
        )
    return tuple(kinds or KINDS)


def _entries(kinds: list[str] | None) -> list[Entry]:
    wanted = _checked_kinds(kinds)
    return [e for e in Cache(default_folder()).entries() if e.kind in wanted]


def _entry_row(entry: Entry) -> display.Row:
    return {
        "kind": entry.kind,
        "name": entry.name,
        "path": str(entry.path),
        "size_bytes": entry.size_bytes,
        "modified_ns": entry.modified_ns,
        "key": dict(entry.key),
        "problem": entry.problem,
    }


def _age(entry: Entry) -> str:
    hours = (time.time_ns() - entry.modified_ns) / 3.6e12
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.0f} days"


def _for(entry: Entry) -> str:
    """The facts of a key that tell entries of one kind apart at a glance."""
    facts = {"profile": ("profile",), "options": ("block",), "plan": ("graph", "budget")}
    return ", ".join(f"{n} {_short(entry.key.get(n, '?'))}" for n in facts[entry.kind])


def _short(fact: str) -> str:
    """Digests by their beginning, as plans print them."""
    return fact[:12] if len(fact) == 64 else fact


def main() -> None:
    """Run the command line; an interrupted one does not wait for solvers that are still busy."""
    try:
        app()
    except (SystemExit, OSError) as end:
        if getattr(end, "filename", None) is not None:
            raise  # it is not stdout's
        code = _flushed(end)
        if code == ExitCode.INTERRUPTED:
            sys.stderr.flush()
            os._exit(ExitCode.INTERRUPTED)
        raise SystemExit(code) from None


def _flushed(end: SystemExit | OSError) -> Any:
    """The exit code, once stdout has what was printed: a reader that went away (`| head`) wanted
    no more; a stdout that cannot be written is an error."""
    error = end if isinstance(end, OSError) else None
    if isinstance(end.__context__, BrokenPipeError):
        error = end.__context__
    try:
        sys.stdout.flush()
    except OSError as found:
        error = found
    if error is None:
        assert isinstance(end, SystemExit)
        return end.code
    # What is left is not written at exit either.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    typer.echo(f"rockplan: stdout cannot be written: {error.strerror}", err=True)
    return ExitCode.USAGE
