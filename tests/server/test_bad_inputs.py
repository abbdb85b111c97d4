"""Wrong requests get the right status, in OpenAI's shape, and leave nothing behind."""

from pathlib import Path

import pytest

from looseleaf.server.protocol.answers import ErrorBody
from tests.server.bad_inputs import BAD_INPUTS, BadInput, table
from tests.server.live import Live

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "wrong-requests.md"


@pytest.mark.parametrize("bad", BAD_INPUTS, ids=lambda bad: bad.name)
def test_a_wrong_request_is_refused_in_openais_shape(live: Live, bad: BadInput) -> None:
    response = live.client.request(bad.method, bad.path, content=bad.content, headers=bad.headers)
    assert response.status_code == bad.status, response.text
    error = ErrorBody.model_validate_json(response.content).error
    assert error.param == bad.param
    assert len(error.message.split()) >= 3
    assert len(error.message) < 1000
    assert response.headers["x-request-id"]


def test_no_page_and_no_place_is_lost_by_wrong_requests(live: Live) -> None:
    live.wait_until_idle()
    before = live.now()
    for bad in BAD_INPUTS:
        live.client.request(bad.method, bad.path, content=bad.content, headers=bad.headers)
    live.wait_until_idle()
    after = live.now()
    assert after.pages == before.pages
    assert after.registered_documents == before.registered_documents
    assert after.counters.failed == before.counters.failed


def test_the_table_in_the_documentation_is_this_one() -> None:
    assert len(BAD_INPUTS) >= 60
    assert len({bad.name for bad in BAD_INPUTS}) == len(BAD_INPUTS)
    text = DOCS.read_text(encoding="utf-8")
    assert table() in text, f"write tests/server/bad_inputs.py's table() into {DOCS.name}"
