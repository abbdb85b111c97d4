"""Each step is named before it runs, and the time left follows from the share that is done."""

import io

import pytest
from rich.console import Console

from looseleaf_lab.bench.progress import SILENT, ConsoleProgress
from looseleaf_lab.bench.timing import measure_in_turn


class Clock:
    """Seconds that only `pass_` moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def text() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def progress(clock: Clock, text: io.StringIO) -> ConsoleProgress:
    return ConsoleProgress(Console(file=text, force_terminal=False), clock)


def test_a_step_is_printed_before_it_runs(progress: ConsoleProgress, text: io.StringIO) -> None:
    for item in progress.over(["decode", "prefill"]):
        assert text.getvalue().splitlines()[-1].endswith(f" of 2: {item}")


def test_the_time_left_is_that_of_the_steps_that_are_left(
    progress: ConsoleProgress, clock: Clock, text: io.StringIO
) -> None:
    for _ in progress.over(range(4), lambda n: f"case {n}"):
        clock.pass_(10)
    lines = text.getvalue().splitlines()
    assert "left" not in lines[0]
    assert [line.rpartition("(about ")[2] for line in lines[1:]] == [
        "30 s left)", "20 s left)", "10 s left)",
    ]  # fmt: skip


def test_work_weighs_steps(progress: ConsoleProgress, clock: Clock, text: io.StringIO) -> None:
    for work in progress.over((1.0, 9.0), work=float):
        clock.pass_(10 * work)
    assert text.getvalue().splitlines()[1].endswith("(about 90 s left)") or (
        "about 2 min left" in text.getvalue()
    )


def test_loops_nest(progress: ConsoleProgress) -> None:
    shares = []
    for _ in progress.over("ab"):
        for _ in progress.over("cd"):
            shares.append(progress.share())
    assert shares == [0.0, 0.25, 0.5, 0.75]
    assert progress.share() == 0.0


def test_an_inner_step_is_printed_only_after_silence(
    progress: ConsoleProgress, clock: Clock, text: io.StringIO
) -> None:
    for _ in progress.over("a"):
        for _ in progress.over(range(100), lambda n: f"run {n}"):
            clock.pass_(1)
    inner = [line for line in text.getvalue().splitlines() if "run" in line]
    assert len(inner) == 19


def test_a_loop_that_is_left_early_leaves_no_trace(progress: ConsoleProgress) -> None:
    steps = progress.over("abc")
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert progress.share() == 0.0


def test_a_terminal_keeps_a_line_with_the_step(clock: Clock, text: io.StringIO) -> None:
    progress = ConsoleProgress(Console(file=text, force_terminal=True, width=80), clock)
    with progress.live():
        list(progress.over("a"))
    assert "1 of 1: a" in text.getvalue()


def test_each_run_in_turn_is_a_step(progress: ConsoleProgress, clock: Clock) -> None:
    shares = []

    def arm() -> float:
        shares.append(progress.share())
        return 1.0

    taken = measure_in_turn({"x": arm, "y": arm}, repetitions=1, progress=progress)
    assert shares == [0.0, 0.25, 0.5, 0.75]
    assert taken == measure_in_turn({"x": lambda: 1.0, "y": lambda: 1.0}, 1)


def test_without_a_console_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(SILENT.over("ab")) == ["a", "b"]
    SILENT.stage("x")
    assert capsys.readouterr() == ("", "")
