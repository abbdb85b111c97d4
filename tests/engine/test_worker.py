"""What the thread of an engine does between two steps."""

import threading
import time

from looseleaf import SamplingParams
from looseleaf.prompt.request import Request, TextPart
from tests.engine.harness import Folder
from tests.engine.test_async import PATIENCE, engine


class Watcher:
    """Watches for what is ``done``, and counts how often it is asked."""

    def __init__(self, *, done: bool) -> None:
        self.done = done
        self.looks = 0
        self.asked = threading.Event()
        self.errors: list[Exception] = []

    def look(self) -> bool:
        self.looks += 1
        self.asked.set()
        return self.done


class Gate:
    """A command that keeps the engine's thread until it is opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def __call__(self) -> None:
        assert self._opened.wait(PATIENCE)

    def open(self) -> None:
        self._opened.set()


def test_whoever_watches_is_asked_once_for_commands_that_came_together(checkpoint: Folder) -> None:
    with engine(checkpoint) as llm:
        worker, gate, waiting = llm._worker, Gate(), Watcher(done=False)
        worker.put(gate)
        worker.watch(waiting.look, waiting.errors.append)
        for _ in range(50):
            worker.put(lambda: None)
        gate.open()
        # whoever comes behind them is asked at once
        last = Watcher(done=True)
        worker.watch(last.look, last.errors.append)
        assert last.asked.wait(PATIENCE)
        assert 1 <= waiting.looks <= 3
        assert not waiting.errors and not last.errors
    assert waiting.errors


def test_what_is_done_when_the_end_comes_is_told_as_done(checkpoint: Folder) -> None:
    with engine(checkpoint) as llm:
        worker, gate, done = llm._worker, Gate(), Watcher(done=True)
        worker.put(gate)
        worker.watch(done.look, done.errors.append)
        worker._shut("closed")
        gate.open()
        assert done.asked.wait(PATIENCE)
    assert not done.errors


def test_what_a_step_has_done_is_seen_by_whoever_asks_behind_it(checkpoint: Folder) -> None:
    """Also by a command that came while the step was computed."""
    with engine(checkpoint) as llm:
        worker, seen, done = llm._worker, list[int](), threading.Event()

        def look() -> None:
            seen.append(worker.snapshot.counters.output_tokens)
            done.set()

        request = Request(
            "asks", (TextPart((5, 6, 7)),), SamplingParams(max_tokens=1, ignore_eos=True)
        )
        # called in the step that has the token, behind which the command then stands in line
        worker.open(request, time.perf_counter(), lambda _: worker.put(look))
        assert done.wait(PATIENCE)
        assert seen == [1]
