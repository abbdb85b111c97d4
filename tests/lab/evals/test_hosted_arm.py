"""Hosted arms read the share of keys that they name, and all of it answers like full attention."""

import pytest

from looseleaf import LLM, Document
from looseleaf.config import Revise
from looseleaf.llm.load import reference_model
from looseleaf.prompt.request import Part
from looseleaf_lab.evals.arms import EngineArm, HostedArm
from looseleaf_lab.evals.task import Item
from looseleaf_lab.evals.world import make_example


def test_hosted_arms_answer_and_say_what_they_read() -> None:
    example = make_example("lookup", 3, num_documents=6)
    item = Item("3", example.documents, example.question, (example.answer,))
    llm = LLM(reference_model("causal"), device="cpu", num_pages=400)
    (plain,) = EngineArm(llm, "full", "prompt").answer([item])
    (whole,) = HostedArm(llm, 1.0).answer([item])
    assert whole.text == plain.text
    full, hosted = EngineArm(llm, "full", "prompt"), HostedArm(llm, 1.0)
    assert _tokens(llm, full.parts(item)) == _tokens(llm, hosted.parts(item))
    assert whole.report["keys_read"] == 1.0
    (few,) = HostedArm(llm, 0.5, kind="graph").answer([item])
    assert 0.3 < few.report["keys_read"] < 0.6
    # a whole number is so many keys, as on the command line: both ends and one that is found
    one = HostedArm(llm, 1, kind="graph")
    (least,) = one.answer([item])
    num_tokens = len(llm.engine.prompts.from_document(Document(item.documents))[-2].tokens)
    assert least.report["keys_read"] == pytest.approx((4 + 16 + 1) / num_tokens, rel=0.01)
    assert one.name != HostedArm(llm, 1.0, kind="graph").name
    (revised,) = HostedArm(llm, 40, kind="graph", revise=Revise(3)).answer([item])
    assert 1 < revised.report["exposure_1"] <= revised.report["exposure_2"]
    assert revised.report["keys_read"] < few.report["keys_read"]
    assert llm.engine.hosting.built == 1
    # where nothing is there to host, an answer is that of full attention
    bare = Item("4", (), example.question, (example.answer,))
    (alone,) = HostedArm(llm, 0.05).answer([bare])
    assert alone.text == full.answer([bare])[0].text


def _tokens(llm: LLM, parts: list[Part]) -> list[int]:
    """Of the prompt by the chat template."""
    made = llm.engine.prompts.from_messages([{"role": "user", "content": parts}])
    return [token for part in made for token in part.tokens]
