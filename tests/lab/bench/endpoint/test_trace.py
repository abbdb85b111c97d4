"""Traces in Mooncake's form."""

import json
from typing import Any

import pytest

from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.endpoint.trace import read_trace, trace_prompts

LINE: dict[str, Any] = {
    "timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [4, 7],
}  # fmt: skip


def test_blocks_with_one_id_have_one_text_and_arrivals_follow_the_speed() -> None:
    later = LINE | {"timestamp": 5000, "input_length": 1030, "hash_ids": [4, 8, 9]}
    trace = read_trace([json.dumps(later), "", json.dumps(LINE)], "t")
    first, second = trace_prompts(trace, speed=4.0)
    assert (first.at, second.at, first.output) == (0.0, 0.5, 9)
    assert first.documents == second.documents[:1] != second.documents[1:]
    lengths = [len(text.split()) for text in (*second.documents, second.text, first.text)]
    assert lengths == [512, 512, 6, 188]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "Expecting property name"),
        ("[]", "a request is a JSON object"),
        (json.dumps({"timestamp": 1}), "the field input_length is missing"),
        (json.dumps(LINE | {"timestamp": True}), "timestamp must be a number"),
        (json.dumps(LINE | {"output_length": 0}), "output_length must be a positive whole number"),
        (json.dumps(LINE | {"hash_ids": ["a", 1]}), "hash_ids must be a list of whole numbers"),
        (
            json.dumps(LINE | {"hash_ids": [1]}),
            "700 tokens are 2 blocks of 512, but hash_ids has 1",
        ),
    ],
)
def test_a_bad_line_is_reported_by_its_number(line: str, sentence: str) -> None:
    with pytest.raises(InvalidOption, match=f"^trace, line 2: {sentence}"):
        read_trace([json.dumps(LINE), line], "trace")


def test_an_empty_trace_is_an_error() -> None:
    with pytest.raises(InvalidOption, match="has no requests"):
        read_trace(["\n"], "trace")
