"""What is refused before it is parsed: bodies of too many values, or nested too deep, wherever the
pieces end in which they arrive."""

import json
import time
from typing import Any

import pytest

from looseleaf.server.errors import ApiError
from looseleaf.server.names import REFERENCE_NAME
from looseleaf.server.scan import MAX_DEPTH, Scan, most_values
from tests.server.live import Live, live_server

TEXTS = ["a, b: [c] {d}", 'say "a, [b]"', "\\", '\\"', 'x\\\\"[,', "\\\\\\", "ü,[", "\n\t{"]
DOCUMENT = {"text": TEXTS, "nested": [[1, {"a, b": -1.5e3}], [], {}], "quote\\": None}


def scanned(content: bytes, most: int, size: int) -> None:
    scan = Scan(most)
    for start in range(0, len(content), size):
        scan.push(content[start : start + size])


def marks(value: Any) -> int:
    """Commas, colons and opening brackets of a value as it is written."""
    if isinstance(value, dict):
        inner = [marks(one) for one in value.values()]
        return 1 + len(inner) + max(0, len(inner) - 1) + sum(inner)
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(marks, value))
    return 0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_marks_inside_of_texts_are_no_values(size: int, ascii_only: bool) -> None:
    content = json.dumps(DOCUMENT, ensure_ascii=ascii_only).encode()
    most = marks(DOCUMENT)
    scanned(content, most, size)
    with pytest.raises(ApiError) as caught:
        scanned(content, most - 1, size)
    assert caught.value.code == "too_many_values"


@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_depth_is_counted_over_pieces(size: int) -> None:
    flat = b"[" + b"[],{}," * 40 + b'"[[[["]'
    scanned(flat, 1000, size)
    scanned(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, 1000, size)
    with pytest.raises(ApiError, match="nested deeper"):
        scanned(b"[" * (MAX_DEPTH + 1), 1000, size)


def test_texts_are_counted_where_nothing_is_between_them() -> None:
    with pytest.raises(ApiError):
        scanned(b'""' * 1001, 1000, 64)


def test_several_prompts_of_the_context_have_room() -> None:
    assert most_values(4096) == 2**16
    assert most_values(2**17) == 2**19


@pytest.mark.parametrize(
    "filling", [b"[],", b"1,", b'{"a":1},', b'"",'], ids=["arrays", "numbers", "objects", "texts"]
)
def test_a_body_of_many_values_is_refused_before_it_is_parsed(live: Live, filling: bytes) -> None:
    body = b'{"model":"m","messages":[' + filling * 400_000 + b"[]]}"
    headers = {"Content-Type": "application/json"}
    start = time.process_time()
    answer = live.client.post("/v1/chat/completions", content=body, headers=headers)
    # parsing and checking as many takes a good part of a second, in which nobody gets a token
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_values")
    assert time.process_time() - start < 5
    live.wait_until_idle()


def test_the_largest_body_follows_the_context(live: Live) -> None:
    assert live.service.max_body == 4 * 2**20
    body = {"model": REFERENCE_NAME, "prompt": "x" * (5 * 2**20)}
    answer = live.post("/v1/completions", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_an_operator_says_how_large_a_body_may_be() -> None:
    with live_server(config={"max_body_mib": 0.001}) as server:
        assert server.service.max_body == 1048
        answer = server.post("/v1/completions", {"model": REFERENCE_NAME, "prompt": "x" * 2000})
        assert answer.status_code == 413
