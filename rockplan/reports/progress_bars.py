"""Progress bars: shown on a terminal while a plan is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from rockplan.values import progress


@contextmanager
def waiting() -> Iterator[None]:
    """While the `with` block runs, show on stderr how far planning has come and how long it will
    take; nothing if stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    stages: dict[str, TaskID] = {}

    def show(step: progress.StageProgress) -> None:
        for stage, task in stages.items():
            bars.update(task, visible=stage == step.stage)
        if step.stage not in stages:
            stages[step.stage] = bars.add_task(step.stage, total=step.total)
        bars.update(stages[step.stage], total=step.total, completed=step.done)

    with bars, progress.listening(show):
        yield
