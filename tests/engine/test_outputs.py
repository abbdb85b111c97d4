"""Sampling options, stops, log-probabilities and streams, as they come out of the engine."""

import pytest
import torch

from looseleaf import LLM, Document, SamplingParams
from looseleaf.errors import InvalidRequest, PoolTooSmall
from looseleaf.prompt.request import Prompt
from tests.engine.harness import GREEDY, Folder, ask, assert_idle, document, make_llm, words

PROMPT = [words(1, 19), document(1, 40), words(2, 9)]
END = 1


@pytest.fixture(scope="module")
def llm(checkpoint: Folder) -> LLM:
    return make_llm(checkpoint())


def letters(llm: LLM, seed: int, max_tokens: int = 24, **options: object) -> SamplingParams:
    """Draws lower-case letters only, so that the text is as long as the tokens are many."""
    ids = [llm.engine.tokenizer.encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz"]
    bias = dict.fromkeys(ids, 60.0)
    return SamplingParams(max_tokens=max_tokens, seed=seed, logit_bias=bias, **options)  # type: ignore[arg-type]


def test_a_seed_gives_the_same_draws_in_every_call_and_another_seed_others(llm: LLM) -> None:
    texts = [ask(llm, [PROMPT], letters(llm, seed))[0].output.text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 24


def test_without_a_seed_two_requests_draw_differently(llm: LLM) -> None:
    first, second = ask(llm, [PROMPT] * 2, SamplingParams(max_tokens=12, ignore_eos=True))
    assert first.token_ids != second.token_ids


def test_a_stop_string_ends_the_text_before_itself(llm: LLM) -> None:
    whole = ask(llm, [PROMPT], letters(llm, 1))[0].output.text
    stop = whole[8:11]
    (answer,) = ask(llm, [PROMPT], letters(llm, 1, stop=[stop, "0"]))
    ended = answer.output.outputs[0]
    assert ended.text == whole[: whole.index(stop)]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    options = {"stop": stop, "include_stop_str_in_output": True}
    (answer,) = ask(llm, [PROMPT], letters(llm, 1, **options))
    assert answer.output.text == whole[: whole.index(stop) + 3]


def test_a_stop_token_or_the_end_token_ends_an_answer_unless_ignored(llm: LLM) -> None:
    ends = SamplingParams(max_tokens=8, temperature=0.0, logit_bias={END: 99.0})
    (answer,) = ask(llm, [PROMPT], ends)
    first = answer.output.outputs[0]
    assert (first.token_ids, first.text, first.finish_reason) == ((END,), "", "stop")
    ignored = SamplingParams(max_tokens=5, temperature=0.0, logit_bias={END: 99.0}, ignore_eos=True)
    second = ask(llm, [PROMPT], ignored)[0].output.outputs[0]
    assert (second.token_ids, second.finish_reason) == ((END,) * 5, "length")
    stop_id = SamplingParams(
        max_tokens=8, temperature=0.0, logit_bias={300: 99.0}, stop_token_ids=[300]
    )
    third = ask(llm, [PROMPT], stop_id)[0].output.outputs[0]
    assert (third.token_ids, third.finish_reason, third.stop_reason) == ((300,), "stop", 300)


def test_no_answer_ends_before_min_tokens_or_after_max_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, min_tokens=4, temperature=0.0, logit_bias={END: 99.0})
    output = ask(llm, [PROMPT], params)[0].output.outputs[0]
    assert len(output.token_ids) == 5
    assert output.token_ids[-1] == END not in output.token_ids[:-1]
    for max_tokens in (1, 7):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        output = ask(llm, [PROMPT], params)[0].output.outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (max_tokens, "length")


def test_log_probabilities_are_those_of_the_models_logits(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=3, logprobs=3, ignore_eos=True)
    (answer,) = ask(llm, [PROMPT], params)
    output = answer.output.outputs[0]
    assert output.logprobs is not None
    expected = answer.logits.log_softmax(-1)
    for token, entries, row in zip(output.token_ids, output.logprobs, expected, strict=True):
        assert entries[0].token_id == token
        assert entries[0].logprob == pytest.approx(float(row[token]), abs=1e-5)
        likeliest = [n for n in row.topk(3).indices.tolist() if n != token]
        assert [entry.token_id for entry in entries[1:]] == likeliest
        assert [e.logprob for e in entries[1:]] == pytest.approx(row[likeliest].tolist(), abs=1e-5)
    total = sum(entries[0].logprob for entries in output.logprobs)
    assert output.cumulative_logprob == pytest.approx(total)
    plain = ask(llm, [PROMPT])[0].output.outputs[0]
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)


def test_greedy_takes_the_likeliest_token_with_or_without_logprobs(llm: LLM) -> None:
    (plain,) = ask(llm, [PROMPT])
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    (reported,) = ask(llm, [PROMPT], params)
    assert plain.token_ids == reported.token_ids == tuple(plain.logits.argmax(-1).tolist())


def test_penalties_count_prompt_documents_and_output(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=20, temperature=0.0, ignore_eos=True, frequency_penalty=2.0,
        presence_penalty=2.0, repetition_penalty=50.0,
    )  # fmt: skip
    (answer,) = ask(llm, [PROMPT], params)
    assert len(set(answer.token_ids)) > 15
    assert not set(answer.token_ids[:10]) & set(answer.output.prompt_token_ids)


@pytest.mark.parametrize("stop", [(), ("e", "zz"), ("abc", "q")])
def test_a_stream_only_grows_and_ends_as_the_whole_answer(llm: LLM, stop: tuple[str, ...]) -> None:
    params = letters(llm, 7, stop=stop)
    expected = ask(llm, [PROMPT], params)[0].output
    llm.engine.store.evict_idle()
    heard: list[tuple[int, int]] = []
    parts = llm.engine.prompts.from_parts(PROMPT)
    texts, last = [""], None
    for last in llm.stream(parts, params, on_prefill=lambda *place: heard.append(place)):
        assert last.text.startswith(texts[-1])
        texts.append(last.text)
    assert last is not None
    assert last.finished
    assert (last.text, last.token_ids) == (expected.text, expected.token_ids)
    assert last.outputs[0].finish_reason == expected.outputs[0].finish_reason
    assert len(texts) == len(expected.token_ids) + 1
    assert_idle(llm)


@pytest.mark.parametrize(
    "prompt", ["who?", PROMPT, tuple(PROMPT), [[5, 6, 7]]], ids=["text", "parts", "tuple", "ids"]
)
def test_a_stream_takes_a_prompt_as_generate_takes_each(llm: LLM, prompt: Prompt) -> None:
    (expected,) = llm.generate([prompt], GREEDY)
    *_, last = llm.stream(prompt, GREEDY)
    assert last.token_ids == expected.token_ids
    *_, salted = llm.stream(prompt, GREEDY, salt=repr(prompt), deadline=60.0)
    assert salted.reuse.document_tokens_reused == 0
    assert_idle(llm)


@pytest.mark.usefixtures("unchecked")
def test_a_stream_of_what_is_no_prompt_is_refused_before_it_is_read(llm: LLM) -> None:
    for wrong in (Document("a text"), 5, None):
        with pytest.raises(InvalidRequest, match="a prompt is a string or a list of parts, not"):
            llm.stream(wrong, GREEDY)  # type: ignore[arg-type]


def test_progress_is_heard_while_a_prompt_is_read(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), max_num_batched_tokens=10, max_num_seqs=2)
    parts = llm.engine.prompts.from_parts(PROMPT)
    heard: list[tuple[int, int]] = []
    for _ in llm.stream(parts, GREEDY, on_prefill=lambda *place: heard.append(place)):
        pass
    done = [place[0] for place in heard]
    assert done[0] == 0
    total = sum(len(part.tokens) for part in parts)
    assert done == sorted(done)
    assert len(set(done)) > 4
    assert {place[1] for place in heard} == {total}


def test_a_stream_that_is_left_early_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream(llm.engine.prompts.from_parts(PROMPT), GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm)


def test_a_stream_tells_its_end_though_another_call_finished_the_work(llm: LLM) -> None:
    (expected,) = ask(llm, [PROMPT])
    stream = llm.stream(llm.engine.prompts.from_parts(PROMPT), GREEDY)
    next(stream)
    llm.generate("in between", GREEDY)
    rest = list(stream)
    assert rest[-1].finished
    assert rest[-1].token_ids == expected.token_ids


def test_metrics_follow_the_life_of_a_request(llm: LLM) -> None:
    metrics = ask(llm, [PROMPT])[0].output.metrics
    assert metrics.admitted is not None
    assert metrics.first_token is not None
    assert metrics.finished is not None
    assert 0 <= metrics.admitted <= metrics.first_token <= metrics.finished


def test_max_tokens_none_fills_the_context_or_the_pool(checkpoint: Folder) -> None:
    prompt = words(1, 30)
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    by_context = make_llm(checkpoint(), max_model_len=48)
    (answer,) = ask(by_context, [prompt], params)
    assert len(answer.all_token_ids) == 48
    by_pool = make_llm(checkpoint(), num_pages=3)
    (answer,) = ask(by_pool, [prompt], params)
    assert len(answer.all_token_ids) == 48
    with pytest.raises(PoolTooSmall):
        by_pool.generate(prompt, SamplingParams(max_tokens=30))


def test_outputs_come_in_the_order_of_the_prompts_each_with_its_own_parameters(llm: LLM) -> None:
    prompts = [words(seed, 10 + seed) for seed in range(5)]
    params = [SamplingParams(max_tokens=1 + n, ignore_eos=True) for n in range(5)]
    answers = ask(llm, prompts, params)
    assert [len(a.token_ids) for a in answers] == [1, 2, 3, 4, 5]
    expected = [llm.engine.tokenizer.encode(prompt) for prompt in prompts]
    assert [a.output.prompt_token_ids for a in answers] == expected
    assert torch.isfinite(torch.cat([a.logits for a in answers])).all()
