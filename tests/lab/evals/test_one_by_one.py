"""MapReduce and MapRerank: what they ask, and what becomes of the answers."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from jaxtyping import config

from looseleaf import LLM
from looseleaf.llm.load import reference_model
from looseleaf_lab.evals.catalog import ARMS
from looseleaf_lab.evals.one_by_one import MapReduceArm, MapRerankArm
from looseleaf_lab.evals.run import Runner, Source
from looseleaf_lab.evals.task import Item
from looseleaf_lab.evals.world import NO_ANSWER
from looseleaf_lab.evals.world_tasks import WorldTask

RUNNER = Runner(Source("", ""))


@pytest.fixture
def unchecked() -> Iterator[None]:
    """A script may stand for an engine."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


class Scripted:
    """Stands for an engine: says what a script has for each prompt, and keeps the prompts."""

    def __init__(self, script: dict[tuple[str, ...], tuple[str, float]]) -> None:
        self.engine = SimpleNamespace(tokenizer=SimpleNamespace(has_chat_template=True))
        self.script, self.asked = script, []  # type: ignore[var-annotated]

    def chat(self, conversations: Any, params: Any) -> list[Any]:
        outputs = []
        for (message,) in conversations:
            *documents, question = message["content"]
            texts = tuple(document.text for document in documents)
            self.asked.append((texts, question))
            said, logprob = self.script.get(texts, ("nothing", -9.0))
            one = SimpleNamespace(text=said, token_ids=(1, 2), cumulative_logprob=logprob)
            outputs.append(SimpleNamespace(text=said, outputs=(one,)))
        return outputs


ITEM = Item("1", ("a", "b", "c"), "Who?", ("Mira.",))
SCRIPT = {
    ("a",): ("Mira.", -1.0),
    ("b",): (NO_ANSWER, -0.1),
    ("c",): ("Tolland.", -0.5),
    ("Mira.\nTolland.",): ("Mira Tolland.", -0.2),
}


@pytest.mark.usefixtures("unchecked")
def test_map_reduce_answers_from_the_answers_that_say_something() -> None:
    llm: Any = Scripted(SCRIPT)
    (answer,) = MapReduceArm(llm).answer([ITEM])
    assert answer.text == "Mira Tolland."
    assert [texts for texts, _ in llm.asked] == [("a",), ("b",), ("c",), ("Mira.\nTolland.",)]
    assert {question for _, question in llm.asked} == {"Who?"}


@pytest.mark.usefixtures("unchecked")
def test_map_rerank_takes_the_surest_answer_but_no_refusal() -> None:
    llm: Any = Scripted(SCRIPT)
    (answer,) = MapRerankArm(llm).answer([ITEM])
    assert answer.text == "Tolland."


@pytest.mark.usefixtures("unchecked")
def test_where_all_decline_the_answer_declines() -> None:
    script = {("a",): (NO_ANSWER, -1.0), (NO_ANSWER,): (NO_ANSWER, -1.0)}
    item = Item("1", ("a",), "Who?", ("Mira.",))
    for arm in (MapReduceArm, MapRerankArm):
        llm: Any = Scripted(script)
        (answer,) = arm(llm).answer([item])
        assert answer.text == NO_ANSWER


@pytest.mark.parametrize("name", ["map-reduce", "map-rerank"])
def test_the_reference_model_finds_facts_one_document_at_a_time_but_no_chains(name: str) -> None:
    llm = LLM(reference_model("causal"), dtype="float32")
    arm = ARMS[name](llm, None)
    right = [
        sum(one.metrics["exact"] for one in RUNNER.run(task, arm, range(6)))
        for task in (WorldTask("lookup"), WorldTask("chain", hops=2))
    ]
    assert right[0] >= 5 and right[1] <= 1
