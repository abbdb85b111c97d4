"""A progress bar on a terminal for the startup of a server: measurements, graph capture."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def startup_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A callback ``(stage, completed, total)`` of the bar; silent outside of terminals."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        # rich before 15 prints an empty line for a disabled bar, which would break JSON logs
        yield lambda stage, completed, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        stages = {}

        def update(stage: str, completed: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bar.add_task(stage)
            bar.update(stages[stage], completed=completed, total=total)

        yield update
