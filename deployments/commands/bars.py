"""Bars of work that goes in stages. Knows the terminal, not the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn


@contextmanager
def stage_bars(console: Console) -> Iterator[Callable[[str, float, str], None]]:
    """Yield a reporter of (stage, fraction done, message) that draws one bar per stage; a message of many lines is printed."""
    columns = (TextColumn("{task.description:<10}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, TextColumn("{task.fields[message]}"), console=console) as progress:

        def report(stage: str, fraction: float, message: str) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=1.0, message="")
            line, more, _ = message.partition("\n")
            progress.update(tasks[stage], completed=fraction, message=line)
            if more:  # a table
                progress.console.print(message, markup=False, highlight=False)

        yield report
