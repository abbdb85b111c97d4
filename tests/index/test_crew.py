"""Host threads run every unit of a part once, for every caller and number of threads."""

import ctypes
import threading
from collections import Counter

import pytest

from looseleaf.index.host_threads import HostThreads, Part, set_parts

UNIT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


def run(crew: HostThreads, unit: object, *totals: int) -> None:
    """Run a layer with a part for each number of units."""
    address = ctypes.cast(unit, ctypes.c_void_p).value  # type: ignore[arg-type]
    layers = crew.layers(1, 0, 0)
    parts = set_parts(layers[0], [Part(address, None, total) for total in totals])
    crew.run(layers[0])
    del parts


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_unit_is_done_once(threads: int) -> None:
    crew, done = HostThreads(threads), Counter[int]()
    lock = threading.Lock()

    def unit(task: object, number: int) -> None:
        with lock:
            done[number] += 1

    for total in (0, 1, threads, 3 * threads + 1, 64):
        done.clear()
        run(crew, UNIT(unit), total, total)
        assert done == dict.fromkeys(range(total), 2)


@pytest.mark.parametrize("slow", [0, 7])
def test_units_of_a_thread_that_is_held_up_are_done_by_others(slow: int) -> None:
    done: list[int] = []
    all_others = threading.Event()

    def unit(task: object, number: int) -> None:
        if number == slow:
            # no other unit may wait for this one
            assert all_others.wait(10), done
        done.append(number)
        if len(done) == 7:
            all_others.set()

    run(HostThreads(2), UNIT(unit), 8)
    assert sorted(done) == list(range(8)) and done[-1] == slow


def test_a_unit_may_wait_for_those_before_it() -> None:
    crew = HostThreads(3)
    done = [threading.Event() for _ in range(20)]

    def unit(task: object, number: int) -> None:
        assert number == 0 or done[number - 1].wait(10)
        done[number].set()

    run(crew, UNIT(unit), len(done))
    assert all(event.is_set() for event in done)
