"""Outputs under a grammar: what is drawn always fits, and ends when it is whole."""

import asyncio
import json
import re
from typing import Any

import pytest

from looseleaf import LLM, AsyncLLM, SamplingParams
from looseleaf.engine.reports.outputs import CompletionOutput
from looseleaf.errors import InvalidOption, InvalidRequest
from looseleaf.sampling_params import Grammar
from tests.engine.harness import Folder, assert_idle, document, make_llm, words

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "grade": {"enum": ["good", "poor"]},
        "pages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "grade", "pages"],
    "additionalProperties": False,
}
PROMPT = [words(1, 19), document(1, 40), "who?"]


@pytest.fixture(scope="module")
def llm(checkpoint: Folder) -> LLM:
    return make_llm(checkpoint())


def complete(llm: LLM, grammar: Grammar, **options: Any) -> tuple[CompletionOutput, ...]:
    asked = {"max_tokens": 150, "seed": 3, "grammar": grammar, **options}
    (output,) = llm.generate([PROMPT], SamplingParams(**asked))
    assert_idle(llm)
    return output.outputs


def test_a_schema_holds_for_every_output_whatever_is_drawn(llm: LLM) -> None:
    outputs = [
        *complete(llm, Grammar.json_schema(SCHEMA), n=4),
        *complete(llm, Grammar.json_schema(json.dumps(SCHEMA)), temperature=0.0),
        *complete(llm, Grammar.json_schema(SCHEMA), n=2, temperature=3.0, top_k=5, min_p=0.01),
    ]
    for output in outputs:
        assert output.finish_reason == "stop"
        value = json.loads(output.text)
        assert set(value) == {"name", "grade", "pages"}
        assert value["grade"] in ("good", "poor")
        assert len(value["name"]) <= 8
        assert all(isinstance(page, int) and page <= 99 for page in value["pages"])
    assert len({output.text for output in outputs}) > 2


def test_a_json_object_is_one_as_far_as_it_goes(llm: LLM) -> None:
    for output in complete(llm, Grammar.json_object(), n=4):
        assert output.text.startswith("{")
        if output.finish_reason == "stop":
            assert isinstance(json.loads(output.text), dict)


def test_other_grammars_hold_as_well(llm: LLM) -> None:
    pattern = "(yes|no)[0-9]{2}"
    for output in complete(llm, Grammar.regex(pattern), n=4):
        assert re.fullmatch(pattern, output.text)
        assert output.finish_reason == "stop"
    for output in complete(llm, Grammar.lark('start: "a" ("b" | "c")'), n=4):
        assert output.text in ("ab", "ac")


def test_a_whole_output_is_a_stop_even_at_its_last_token(llm: LLM) -> None:
    (free,) = complete(llm, Grammar.regex("[a-c]{5}"))
    assert len(free.token_ids) <= 5
    (exact,) = complete(llm, Grammar.regex("[a-c]{5}"), max_tokens=len(free.token_ids))
    assert (exact.text, exact.finish_reason) == (free.text, "stop")
    (cut,) = complete(llm, Grammar.regex("[a-c]{5}"), max_tokens=len(free.token_ids) - 1)
    assert (cut.finish_reason, free.text.startswith(cut.text)) == ("length", True)


def test_an_end_is_drawn_only_where_the_text_may_end(llm: LLM) -> None:
    (eos,) = llm.engine.tokenizer.eos_token_ids
    # the end token is all but certain, yet the text needs three letters first
    eager = {"logit_bias": {eos: 60.0}}
    (output,) = complete(llm, Grammar.regex("[a-c]{3,9}"), **eager)
    assert re.fullmatch("[a-c]{3}", output.text)
    assert (output.finish_reason, output.token_ids[-1]) == ("stop", eos)
    # and min_tokens holds it back further, but not beyond what the grammar allows
    (output,) = complete(llm, Grammar.regex("[a-c]{3,9}"), min_tokens=6, **eager)
    assert re.fullmatch("[a-c]{6,9}", output.text)
    (output,) = complete(llm, Grammar.regex("[a-c]{3}"), min_tokens=20, **eager)
    assert (len(output.text), output.finish_reason) == (3, "stop")


def test_stop_tokens_and_stop_strings_end_a_constrained_output(llm: LLM) -> None:
    a = llm.engine.tokenizer.token_id("a")
    assert a is not None
    (output,) = complete(llm, Grammar.regex("[bc]{4,30}"), stop_token_ids=[a], logit_bias={a: 60.0})
    assert re.fullmatch("[bc]{4}", output.text)
    assert (output.finish_reason, output.stop_reason) == ("stop", a)
    (output,) = complete(llm, Grammar.regex("[ab]{40}"), stop="ab")
    assert (output.stop_reason, "ab" in output.text) == ("ab", False)


def test_a_grammar_goes_together_with_penalties_logprobs_and_ignore_eos(llm: LLM) -> None:
    (output,) = complete(
        llm,
        Grammar.json_schema(SCHEMA),
        logprobs=3,
        presence_penalty=1.5,
        repetition_penalty=1.3,
        ignore_eos=True,
    )
    assert json.loads(output.text)
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)


def test_a_constrained_output_does_not_depend_on_its_batch(llm: LLM) -> None:
    params = [
        SamplingParams(
            max_tokens=80, seed=n, grammar=Grammar.json_schema(SCHEMA) if n % 2 else None
        )
        for n in range(6)
    ]
    together = llm.generate([PROMPT] * 6, params)
    for output, one in zip(together, params, strict=True):
        (alone,) = llm.generate([PROMPT], one)
        assert alone.token_ids == output.token_ids


def test_preemption_loses_no_place_in_a_grammar(checkpoint: Folder) -> None:
    tight = make_llm(checkpoint(), num_pages=16)
    params = [
        SamplingParams(max_tokens=90, seed=n, grammar=Grammar.regex("[a-f]{80}")) for n in range(3)
    ]
    outputs = tight.generate([PROMPT] * 3, params)
    assert tight.engine.counters.preemptions > 0
    assert all(re.fullmatch("[a-f]{80}", output.text) for output in outputs)


BAD = {
    "wrong-type": Grammar.json_schema({"type": "objec"}),
    "no-json": Grammar.json_schema("{"),
    "no-object": Grammar.json_schema("[1]"),
    "impossible": Grammar.json_schema(False),
    "contradiction": Grammar.json_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    "remote-reference": Grammar.json_schema({"$ref": "http://example.invalid/schema"}),
    "bad-pattern": Grammar.json_schema({"type": "string", "pattern": "("}),
    "circle": Grammar.json_schema({"$ref": "#"}),
    "too-deep": Grammar.json_schema("[" * 100_000),
    "bad-regex": Grammar.regex("("),
    "empty-regex": Grammar.regex(""),
    "bad-lark": Grammar.lark("no grammar"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_grammar_is_refused_before_anything_runs(llm: LLM, name: str) -> None:
    steps = llm.engine.counters.steps
    with pytest.raises(InvalidRequest, match=r"schema|expression|grammar") as refusal:
        llm.generate(["fine?", "who?"], [SamplingParams(), SamplingParams(grammar=BAD[name])])
    assert len(str(refusal.value)) < 400
    assert llm.engine.counters.steps == steps
    assert_idle(llm)


def test_a_schema_that_is_no_json_is_refused() -> None:
    for schema in ({"maximum": float("nan")}, {"enum": {1, 2}}):
        with pytest.raises(InvalidOption, match="JSON"):
            Grammar.json_schema(schema)


def test_a_bias_that_leaves_a_grammar_no_token_ends_that_request_alone(llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    forbidden = {i: -float("inf") for i in range(320) if tokenizer.token_bytes(i)[:1] == b"a"}
    params = SamplingParams(grammar=Grammar.regex("a{20}"), logit_bias=forbidden, temperature=0.0)
    with pytest.raises(InvalidRequest, match="logit_bias"):
        llm.generate([PROMPT], params)
    assert_idle(llm)


def test_a_schema_that_turns_out_too_large_ends_its_request_with_the_reason(llm: LLM) -> None:
    properties = {f"p{n}": {"type": "string"} for n in range(2500)}
    grammar = Grammar.json_schema({"type": "object", "properties": properties})
    with pytest.raises(InvalidRequest, match=r"items; max is") as refusal:
        complete(llm, grammar)
    assert len(str(refusal.value)) < 400
    assert_idle(llm)


def test_a_stream_with_a_bad_schema_ends_before_it_begins(checkpoint: Folder) -> None:
    async def scenario() -> None:
        async with AsyncLLM(checkpoint(), num_pages=32) as llm:
            with pytest.raises(InvalidRequest, match="JSON schema"):
                async for _ in llm.generate("who?", SamplingParams(grammar=BAD["wrong-type"])):
                    raise AssertionError("nothing may be said")
            params = SamplingParams(grammar=Grammar.json_schema(SCHEMA), max_tokens=150, seed=1)
            outputs = [output async for output in llm.generate("who?", params)]
            assert json.loads(outputs[-1].text)

    asyncio.run(asyncio.wait_for(scenario(), 30))
