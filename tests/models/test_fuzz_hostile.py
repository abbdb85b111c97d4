"""Hostile chat templates and tokenizers are drawn, and an answer outside of the law is found."""

import json
import random
import time

import jinja2
import pytest
from tokenizers import Tokenizer as Backend

from looseleaf.errors import InvalidRequest
from tools.fuzz_hostile import templates, text, tokenizers, violations


def test_the_same_seed_draws_the_same_and_all_of_it_can_be_read() -> None:
    drawn = templates(random.Random(1))
    assert drawn == templates(random.Random(1)) != templates(random.Random(2))
    for template in drawn:
        jinja2.Environment(autoescape=True).parse(template)
    for described in tokenizers(random.Random(1)):
        backend = Backend.from_str(json.dumps(described))
        assert backend.encode("b").ids
    assert len(text(random.Random(1))) > 20


@pytest.mark.parametrize("way", ["another error", "too slow"])
def test_what_is_neither_served_nor_refused_in_time_is_found(way: str) -> None:
    def call(one: str) -> None:
        if one == "refused":
            raise InvalidRequest("too long")
        if one == "wrong":
            if way == "another error":
                raise RuntimeError("a panic")
            time.sleep(0.02)

    assert [one for one, _ in violations(call, ["served", "refused", "wrong"], 0.01)] == ["wrong"]
