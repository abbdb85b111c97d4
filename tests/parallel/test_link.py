"""Messages between ranks: one order, one place, one error."""

from collections.abc import Iterator
from multiprocessing import Pipe
from threading import Thread
from typing import Any

import pytest

from looseleaf.errors import EngineFault, InvalidRequest
from looseleaf.parallel import Link


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    """The links of rank 0 and of rank 1."""
    ours, theirs = Pipe()
    yield Link(0, [ours]), Link(1, [theirs])
    ours.close()
    theirs.close()


def beside(function: Any, *arguments: Any) -> tuple[Thread, list[Any]]:
    """``function`` in a thread, and the list that gets its result or its error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function(*arguments))
        except Exception as error:
            results.append(error)

    thread = Thread(target=run)
    thread.start()
    return thread, results


def test_all_ranks_have_the_decision_of_rank_0(links: tuple[Link, Link]) -> None:
    lead, follower = links
    assert lead.decide("tier", lambda: "disk") == "disk"
    assert follower.decide("tier", lambda: "host") == "disk"


def test_all_ranks_raise_the_refusal_of_rank_0(links: tuple[Link, Link]) -> None:
    def refuse() -> None:
        raise InvalidRequest("no such grammar")

    lead, follower = links
    for link in (lead, follower):
        with pytest.raises(InvalidRequest, match="no such grammar"):
            link.attempt("grammar", refuse)


def test_an_agreement_has_the_values_of_all_ranks_in_order(links: tuple[Link, Link]) -> None:
    lead, follower = links
    thread, results = beside(follower.agree, "pages", 7, list)
    assert lead.agree("pages", 9, list) == [9, 7]
    thread.join()
    assert results == [[9, 7]]


def test_ranks_with_other_plans_do_not_go_on(links: tuple[Link, Link]) -> None:
    lead, follower = links
    lead.decide("step 12 rows", lambda: None)
    with pytest.raises(EngineFault, match="plans differ"):
        follower.decide("step 13 rows", lambda: None)


def test_only_the_outermost_command_is_sent(links: tuple[Link, Link]) -> None:
    lead, follower = links
    with lead.command("hold", "prompt"), lead.command("add", "request"):
        pass
    with lead.command("step"):
        pass
    received = [follower.receive(), follower.receive()]
    assert [command.path for command in received if command] == ["hold", "step"]


def test_a_command_after_a_fault_raises_the_first_error(links: tuple[Link, Link]) -> None:
    lead, follower = links
    follower.fail(ValueError("no memory"))
    for _ in range(2):
        with pytest.raises(EngineFault, match=r"rank 1 .*no memory"), lead.command("step"):
            raise RuntimeError("connection closed by peer")


def test_a_lost_rank_is_named(links: tuple[Link, Link]) -> None:
    lead, follower = links
    follower.close()
    with pytest.raises(EngineFault, match="rank 1 of the engine has ended"), lead.command("step"):
        pass
    assert follower.receive() is None
