"""Tenants take threads in fair turns."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from looseleaf.errors import EngineClosed, EngineFault
from looseleaf.sandbox import FairThreads


class Panic(BaseException):
    """As Rust libraries raise it."""


class Stage:
    """Jobs that begin by themselves and end when they are told to."""

    def __init__(self, size: int) -> None:
        self.turns = FairThreads(size, "test")
        self.begun: list[str] = []
        self._changed = threading.Condition()
        self._ends: dict[str, threading.Event] = {}

    def add(self, tenant: str, name: str) -> "Future[str]":
        self._ends[name] = threading.Event()
        return self.turns.submit(tenant, self._job, name)

    def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 30)

    def _job(self, name: str) -> str:
        with self._changed:
            self.begun.append(name)
            self._changed.notify_all()
        assert self._ends[name].wait(30)
        return name


def test_a_tenant_finds_a_free_thread_whatever_another_has_asked_for() -> None:
    stage = Stage(3)
    red = [stage.add("red", f"r{n}") for n in range(10)]
    stage.wait_for(lambda: len(stage.begun) == 2)
    blue = stage.add("blue", "b0")
    stage.wait_for(lambda: "b0" in stage.begun)
    assert stage.begun == ["r0", "r1", "b0"]
    stage.end("b0")
    assert blue.result(30) == "b0"
    stage.end(*(f"r{n}" for n in range(10)))
    assert [future.result(30) for future in red] == [f"r{n}" for n in range(10)]


def test_tenants_that_wait_take_turns() -> None:
    stage = Stage(2)
    futures = [stage.add("red", f"r{n}") for n in range(4)]
    stage.wait_for(lambda: stage.begun == ["r0"])
    futures += [stage.add("blue", f"b{n}") for n in range(3)]
    stage.wait_for(lambda: stage.begun == ["r0", "b0"])
    futures += [stage.add("green", f"g{n}") for n in range(2)]
    for ended in ("b0", "g0", "b1", "g1"):
        number = len(stage.begun)
        stage.end(ended)
        stage.wait_for(lambda number=number: len(stage.begun) > number)  # type: ignore[misc]
    assert stage.begun == ["r0", "b0", "g0", "b1", "g1", "b2"]
    stage.end(*(f"r{n}" for n in range(4)), "b2")
    for future in futures:
        future.result(30)


def test_one_thread_is_enough_for_one_tenant() -> None:
    turns = FairThreads(1, "test")
    assert [turns.submit("red", str, n).result(30) for n in range(3)] == ["0", "1", "2"]


def test_a_cancelled_turn_is_never_taken() -> None:
    stage = Stage(2)
    first, second, third = (stage.add("red", name) for name in ("r0", "r1", "r2"))
    stage.wait_for(lambda: stage.begun == ["r0"])
    assert second.cancel()
    stage.end("r0", "r2")
    assert (first.result(30), third.result(30)) == ("r0", "r2")
    assert stage.begun == ["r0", "r2"]


def test_a_close_refuses_what_waits_and_what_comes() -> None:
    stage = Stage(2)
    first, second = stage.add("red", "r0"), stage.add("red", "r1")
    stage.wait_for(lambda: stage.begun == ["r0"])
    stage.turns.close()
    with pytest.raises(EngineClosed):
        second.result(30)
    with pytest.raises(EngineClosed):
        stage.turns.submit("blue", print)
    stage.end("r0")
    assert first.result(30) == "r0"


def test_a_panic_is_a_fault_of_its_request_only() -> None:
    turns = FairThreads(2, "test")

    def panic() -> None:
        raise Panic("retry-limit-in-match over")

    async def ask() -> str:
        with pytest.raises(EngineFault, match=r"Panic: retry-limit-in-match over"):
            await turns.run("red", panic)
        return await turns.run("red", str, 5)

    assert asyncio.run(ask()) == "5"


def test_who_stops_waiting_gives_up_the_turn() -> None:
    stage = Stage(2)
    first = stage.add("red", "r0")
    stage.wait_for(lambda: stage.begun == ["r0"])

    async def ask() -> None:
        async with asyncio.timeout(0.05):
            await stage.turns.run("red", stage.begun.append, "late")

    with pytest.raises(TimeoutError):
        asyncio.run(ask())
    stage.end("r0")
    first.result(30)
    # the one behind it begins, it does not
    last = stage.add("red", "r1")
    stage.end("r1")
    assert last.result(30) == "r1"
    assert stage.begun == ["r0", "r1"]
