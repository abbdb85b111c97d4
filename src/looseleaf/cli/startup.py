"""A bar on a terminal for what a server does before it listens: measuring, capturing graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def startup_bar() -> Iterator[Callable[[str, int, int], None]]:
    """What to tell a stage, how much of it is done and of how much; elsewhere nothing is shown."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        # rich before 15 writes an empty line for a bar that is disabled, and logs are of JSON lines
        yield lambda stage, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        stages = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bar.add_task(stage)
            bar.update(stages[stage], completed=done, total=total)

        yield tell
