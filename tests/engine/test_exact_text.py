"""The text of an output is exact: read behind its prompt, and where it ends inside a character."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from looseleaf import LLM, SamplingParams
from looseleaf.engine.reports.outputs import CompletionOutput
from looseleaf.prompt.request import Prompt
from tests.checkpoints import make_checkpoint
from tests.models.kinds import KINDS, write_kind

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}b"
END = 2


@pytest.fixture(scope="module", params=["prepend", "metaspace first", "unigram", "byte level"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    assert request.param in KINDS
    folder = make_checkpoint(tmp_path_factory.mktemp("exact") / "model")
    write_kind(folder, request.param)
    path: Path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return LLM(folder, device="cpu", num_pages=40)


def always(llm: LLM, *tokens: str, **options: object) -> SamplingParams:
    """Every token of the output is the first of ``tokens`` that the vocabulary has."""
    ids = (llm.engine.tokenizer.token_id(token) for token in tokens)
    token = next(i for i in ids if i is not None)
    return SamplingParams(temperature=0.0, logit_bias={token: 60.0}, **options)  # type: ignore[arg-type]


def streamed(llm: LLM, prompt: Prompt, params: SamplingParams) -> CompletionOutput:
    """The last output of a stream; each before it is a beginning of its text."""
    outputs = [output.outputs[0] for output in llm.stream(prompt, params)]
    for earlier, later in pairwise(outputs):
        assert later.text.startswith(earlier.text)
    return outputs[-1]


@pytest.mark.parametrize("prompt", ["ab", ["b", [5]], "<s>ab"])
def test_a_raw_prompt_and_its_output_are_one_text(prompt: Prompt, llm: LLM) -> None:
    params = always(llm, "▁a", "Ġa", max_tokens=2, ignore_eos=True)
    (answer,) = llm.generate([prompt], params)
    tokenizer, ids = llm.engine.tokenizer, answer.prompt_token_ids
    (output,) = answer.outputs
    assert tokenizer.decode(ids) + output.text == tokenizer.decode([*ids, *output.token_ids])
    assert output.text == " a a"
    assert streamed(llm, prompt, params).text == output.text


def test_an_answer_in_a_chat_begins_without_the_space_of_beginnings(llm: LLM) -> None:
    params = always(llm, "▁a", "Ġa", max_tokens=2, ignore_eos=True)
    (answer,) = llm.chat([{"role": "user", "content": "ab"}], params)
    tokenizer, (output,) = llm.engine.tokenizer, answer.outputs
    assert output.text == tokenizer.decode(output.token_ids)


@pytest.mark.parametrize("reason", ["length", "stop", "stop id", "stop string"])
def test_an_output_that_ends_inside_a_character_says_so(reason: str, llm: LLM) -> None:
    params = always(llm, "<0xC3>", "Ã", max_tokens=3, ignore_eos=True)
    if reason == "stop":
        bias = {**dict(params.logit_bias or ()), END: 99.0}
        params = SamplingParams(temperature=0.0, logit_bias=bias, min_tokens=2, max_tokens=9)
    elif reason == "stop id":
        (token,) = dict(params.logit_bias or ())
        params = always(llm, "<0xC3>", "Ã", stop_token_ids=[token], min_tokens=2, max_tokens=9)
    elif reason == "stop string":
        params = always(llm, "<0xC3>", "Ã", stop=["\ufffd\ufffd"], max_tokens=9)
    (answer,) = llm.generate(["ab"], params)
    (output,) = answer.outputs
    # before a stop id there are two halves, and that id has no text
    number = {"length": 3, "stop": 2, "stop id": 2, "stop string": 0}[reason]
    assert output.text == "\ufffd" * number
    assert streamed(llm, "ab", params).text == output.text
    assert output.finish_reason == ("length" if reason == "length" else "stop")
