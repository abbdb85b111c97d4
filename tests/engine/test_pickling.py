"""What may be sent to another process, and what is told of an engine, which may not."""

import copy
import pickle
from collections.abc import Callable

import pytest

from looseleaf import LLM, Document, Fuse, Grammar, SamplingParams, Select
from tests.engine.harness import Folder, document, make_llm, words


@pytest.fixture(scope="module")
def llm(checkpoint: Folder) -> LLM:
    return make_llm(checkpoint())


@pytest.mark.parametrize(
    "given",
    [
        Document("Mira Tolland signs travel requests.", "handbook", "alone"),
        SamplingParams(temperature=0.5, stop="x", grammar=Grammar.json_schema({"type": "null"})),
        Fuse("links", ratio=0.2),
        Select("quest", tokens=64),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_a_request_is_made_of_can_be_sent(given: object) -> None:
    assert pickle.loads(pickle.dumps(given)) == given


def test_an_output_can_be_sent(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
    (output,) = llm.generate([[document(1), words(1, 8)]], params)
    assert pickle.loads(pickle.dumps(output)) == output


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_engine_cannot_and_says_what_to_do(llm: LLM, send: Callable[[LLM], object]) -> None:
    with pytest.raises(TypeError, match="make one in each process"):
        send(llm)
