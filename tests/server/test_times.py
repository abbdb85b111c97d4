"""How long requests wait and how they end, as metrics: of those, too, that do not finish."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.live import Live, live_server
from tests.server.metering import counted
from tests.server.test_behaviour import open_stream

WAITING = "looseleaf_queue_seconds"
FIRST = "looseleaf_time_to_first_token_seconds"


@pytest.fixture
def narrow() -> Iterator[Live]:
    """A server that computes one output at a time."""
    with live_server(engine={"max_num_seqs": 1}) as server:
        yield server


def ended(live: Live) -> dict[str, float]:
    """Requests that ended, by how."""
    values = counted(live)
    ends = ("finished", "aborted", "failed", "deadline")
    return {end: values[f'looseleaf_requests_total{{end="{end}"}}'] for end in ends}


def test_requests_that_run_out_of_time_in_the_queue_are_seen(narrow: Live) -> None:
    stream = open_stream(narrow)
    with ThreadPoolExecutor(3) as pool:
        refused = list(pool.map(lambda _: narrow.chat(deadline=0.3), range(3)))
    assert [answer.status_code for answer in refused] == [408] * 3
    values = counted(narrow)
    # one that runs, and three that never did
    assert values[f"{WAITING}_count"] == 4
    # a part of the deadline passed before the queue
    assert values[f"{WAITING}_sum"] >= 3 * 0.2
    assert values[f"{FIRST}_count"] == 1
    stream.close()
    narrow.wait_until_idle()
    assert ended(narrow) == {"finished": 0, "aborted": 1, "failed": 0, "deadline": 3}


def test_the_first_token_of_an_answer_that_is_cut_is_seen_as_it_comes(narrow: Live) -> None:
    stream = open_stream(narrow)
    values = counted(narrow)
    assert values[f"{FIRST}_count"] == values[f"{WAITING}_count"] == 1
    stream.close()
    narrow.wait_until_idle()
    after = counted(narrow)
    assert after[f"{FIRST}_count"] == after[f"{WAITING}_count"] == 1
    assert after["looseleaf_request_seconds_count"] == 0


def test_a_request_of_several_outputs_waits_once(narrow: Live) -> None:
    answer = narrow.chat(n=3, temperature=1.0)
    assert answer.status_code == 200, answer.text
    values = counted(narrow)
    names = (WAITING, FIRST, "looseleaf_request_seconds")
    assert [values[f"{name}_count"] for name in names] == [1, 1, 1]


def test_what_the_server_computes_for_itself_does_not_wait(narrow: Live) -> None:
    answer = narrow.post("/v1/documents", {"text": "The archive is in the north wing."})
    assert answer.status_code == 201, answer.text
    values = counted(narrow)
    assert values[f"{WAITING}_count"] == values[f"{FIRST}_count"] == 0
