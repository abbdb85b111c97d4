"""What is computed, once; what is reserved, all or nothing; who leaves takes nothing along."""

from typing import Any

import pytest
import torch

from looseleaf import LLM, SamplingParams
from looseleaf.engine.progress import RequestProgress
from looseleaf.errors import EngineFault
from looseleaf.kv.keys import KeySpace
from looseleaf.prompt.request import Prompt, Request
from tests.engine.harness import (
    GREEDY,
    Answer,
    Folder,
    ask,
    assert_idle,
    assert_same_answers,
    document,
    drawn,
    make_llm,
    words,
)

LEAD = words(1, 19)
A, B, C = document(1, 45), document(2, 18), document(3, 30)


def add(llm: LLM, name: str, prompt: Prompt, params: SamplingParams = GREEDY) -> RequestProgress:
    return llm.engine.add(Request(name, llm.engine.prompts.from_parts(prompt), params))


def finish(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check()
    assert_idle(llm)


def num_tokens(llm: LLM, prompt: Prompt) -> tuple[int, int]:
    """Text tokens and document tokens of a prompt."""
    parts = llm.engine.prompts.from_parts(prompt)
    documents = sum(len(part.tokens) for part in parts if hasattr(part, "context_length"))
    return sum(len(part.tokens) for part in parts) - documents, documents


def test_a_missing_document_is_computed_once_however_many_requests_wait(
    checkpoint: Folder,
) -> None:
    llm = make_llm(checkpoint(), prefix_caching=False, max_num_batched_tokens=16, max_num_seqs=8)
    prompts = [[LEAD, A, B, words(10 + n, 5 + n)] for n in range(6)]
    answers = ask(llm, prompts)
    text = sum(num_tokens(llm, prompt)[0] for prompt in prompts)
    assert llm.engine.counters.prompt_tokens == text + num_tokens(llm, prompts[0])[1]
    sources = [[d.source for d in a.output.reuse.documents] for a in answers]
    assert sources == [["computed"] * 2] + [["awaited"] * 2] * 5
    counters = llm.engine.counters
    assert (counters.documents_computed, counters.documents_awaited) == (2, 10)


def test_documents_in_a_new_order_compute_no_document_token(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint())
    ask(llm, [[LEAD, A, B, C, words(10, 9)]])
    before = llm.engine.counters.prompt_tokens
    prompt = [LEAD, C, A, B, words(11, 7)]
    (answer,) = ask(llm, [prompt])
    report = answer.output.reuse
    text, documents = num_tokens(llm, prompt)
    assert (report.document_tokens, report.document_tokens_reused) == (documents, documents)
    assert [(d.name, d.source) for d in report.documents] == [
        (name, "cached") for name in ("d3", "d1", "d2")
    ]
    assert llm.engine.counters.prompt_tokens - before == text - report.text_tokens_cached
    assert report.text_tokens_cached == 16
    assert f"{documents} of {documents} tokens reused" in str(report)


def test_the_same_text_in_another_context_is_another_segment(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint())
    prompts = [
        [LEAD, A, words(10, 9)],
        [words(2, 19), A, words(10, 9)],
        [LEAD, document(1, 45, context="alone"), words(10, 9)],
    ]
    for prompt in prompts:
        (answer,) = ask(llm, [prompt])
        assert answer.output.reuse.document_tokens_reused == 0
    cached = [answer.output.reuse.documents[0].source for answer in ask(llm, prompts)]
    assert cached == ["cached"] * 3


def test_engines_with_different_salts_share_no_key(checkpoint: Folder) -> None:
    engines = [make_llm(checkpoint(), salt=salt) for salt in ("", "tenant")]
    keys = []
    for llm in engines:
        ask(llm, [[LEAD, A, words(10, 30)]])
        keys.append({segment.key for segment in llm.engine.store.segments()})
    assert keys[0]
    assert not keys[0] & keys[1]


def test_a_request_is_admitted_with_all_its_pages_or_takes_none(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), num_pages=14)
    params = drawn(0, max_tokens=60)
    first = add(llm, "first", [words(10, 100)], params)
    llm.engine.step()
    pool = llm.engine.store.pool
    free, segments = pool.num_free, len(llm.engine.store)
    second = add(llm, "second", [words(2, 40), A, C, words(11, 9)], params)
    assert free > 0
    # the first one grows, and nothing is taken on behalf of the second until it ends
    while not first.finished:
        llm.engine.step()
        llm.engine.check()
        if not first.finished:
            assert second.metrics.admitted is None
            assert all(segment.ready for segment in llm.engine.store.segments())
    assert len(llm.engine.store) >= segments
    finish(llm)
    assert len(second.output().token_ids) == 60


def test_idle_segments_make_room_for_new_requests(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), num_pages=12)
    for seed in range(6):
        ask(llm, [[LEAD, document(seed, 60), words(seed, 9)]])
    assert llm.engine.store.counters.evicted_segments > 0
    assert llm.engine.counters.preemptions == 0


CONVOY: list[Prompt] = [
    [LEAD, A, B, words(10, 20)],
    [LEAD, A, words(11, 9)],
    [LEAD, B, A, words(12, 9)],
    [LEAD + words(13, 20)],
]
CONVOY_PARAMS = [drawn(seed, max_tokens=12) for seed in range(len(CONVOY))]
SMALL_STEPS: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4}


def answers_without(llm: LLM, victim: int, at_step: int) -> list[Answer]:
    """The convoy's answers when ``victim`` is cancelled before step ``at_step``."""
    recorder: Any = llm.engine.runner
    names = [f"{victim}-{at_step}-{n}" for n in range(len(CONVOY))]
    added = [add(llm, *each) for each in zip(names, CONVOY, CONVOY_PARAMS, strict=True)]
    for step in range(200):
        if step == at_step:
            llm.engine.abort(names[victim])
            llm.engine.check()
            assert not llm.engine.knows(names[victim])
        if not llm.engine.has_work:
            break
        llm.engine.step()
        llm.engine.check()
    assert_idle(llm)
    outputs = [p.output() for p in added]
    assert outputs[victim].outputs[0].finish_reason in ("abort", "length")
    return [
        Answer(output, torch.stack(recorder.logits[output.request_id, 0]))
        for n, output in enumerate(outputs)
        if n != victim
    ]


@pytest.mark.parametrize("victim", range(len(CONVOY)))
def test_cancelling_at_any_step_frees_everything_and_disturbs_nobody(
    checkpoint: Folder, victim: int
) -> None:
    """The first of the convoy owns documents that others wait for: they take over."""
    llm = make_llm(checkpoint(), **SMALL_STEPS)
    expected = ask(llm, CONVOY, CONVOY_PARAMS)
    others = expected[:victim] + expected[victim + 1 :]
    for at_step in range(0, 14, 1 if victim == 0 else 3):
        llm.engine.store.evict_idle()
        assert_same_answers(answers_without(llm, victim, at_step), others)


def test_a_pending_document_is_handed_over_until_nobody_waits(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), **SMALL_STEPS)
    for name in ("a", "b", "c"):
        add(llm, name, [LEAD, document(4, 120), words(10, 9)])
    for name in ("a", "b", "c"):
        for _ in range(3):
            llm.engine.step()
        pending = [s for s in llm.engine.store.segments() if not s.ready]
        assert len(pending) == 1
        llm.engine.abort(name)
        llm.engine.check()
    assert_idle(llm)
    assert all(segment.ready for segment in llm.engine.store.segments())


def test_a_fault_in_a_step_ends_its_requests_and_the_engine_goes_on(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(checkpoint())
    (expected,) = ask(llm, [CONVOY[0]], CONVOY_PARAMS[0])
    llm.engine.store.evict_idle()
    for good_steps in range(4):
        progress = add(llm, f"doomed {good_steps}", CONVOY[0], CONVOY_PARAMS[0])
        for _ in range(good_steps):
            llm.engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.runner, "run", lambda *_: 1 / 0)
            assert llm.engine.step() == [progress]
        assert isinstance(progress.error, EngineFault)
        assert isinstance(progress.error.__cause__, ZeroDivisionError)
        assert progress.output().outputs[0].finish_reason == "abort"
        assert_idle(llm)
    assert_same_answers(ask(llm, [CONVOY[0]], CONVOY_PARAMS[0]), [expected])


def test_siblings_share_their_prefix_and_differ_in_their_draws(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint())
    prompt = [LEAD, A, words(10, 40)]
    text, documents = num_tokens(llm, prompt)
    (answer,) = ask(llm, [prompt], drawn(3, n=4))
    outputs = answer.output.outputs
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert len({output.token_ids for output in outputs}) == 4
    # what is not a full page of the tail, and its last token, is each sibling's own
    own = (text - 19 - 1) % 16 + 1 + 19 % 16
    assert llm.engine.counters.prompt_tokens <= text + documents + 3 * (own + 16)
    again = ask(llm, [prompt], drawn(3, n=4))[0].output.outputs
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]


def test_no_more_prompts_are_prepared_than_the_next_step_can_compute(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), max_num_batched_tokens=640, max_num_seqs=32)
    added = [add(llm, str(n), [words(n, 40)], drawn(n, max_tokens=8)) for n in range(24)]
    lengths = [one.request.num_tokens for one in added]
    first = next(n for n in range(24) if sum(lengths[:n]) >= 640)
    admitted, computed = [], []
    while llm.engine.has_work:
        llm.engine.step()
        admitted.append(sum(one.metrics.admitted is not None for one in added))
        computed.append(llm.engine.last_step.prompt_tokens)
    assert admitted[:2] == [first, 24]
    # and no step computes less for it
    assert computed[0] >= 640
    assert sum(computed[:2]) == sum(lengths)
    assert_idle(llm)


def test_who_wants_what_is_being_computed_is_admitted_at_once(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), **SMALL_STEPS)
    added = [add(llm, name, [LEAD, document(4, 120), words(10, 9)]) for name in ("a", "b", "c")]
    for _ in range(2):
        llm.engine.step()
    assert all(one.metrics.admitted is not None for one in added)
    finish(llm)


def test_a_step_has_a_little_more_where_that_ends_a_prompt(checkpoint: Folder) -> None:
    """But never more than a sixty-fourth."""
    llm = make_llm(checkpoint(), max_num_batched_tokens=128, max_num_seqs=4)
    steps = []
    for length in (130, 131):
        added = add(llm, str(length), [list(range(length, 2 * length))], drawn(0, max_tokens=1))
        assert added.request.num_tokens == length
        llm.engine.step()
        steps.append(llm.engine.last_step.prompt_tokens)
        finish(llm)
    assert steps == [130, 128]


def test_the_keys_of_a_prompts_pages_are_made_in_one_piece(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece a page would take longer than all else that the host does before the first launch."""
    llm = make_llm(checkpoint())
    calls = []
    made = KeySpace.text_pages

    def counted(self: KeySpace, context: Any, tokens: Any, *rest: Any, **named: Any) -> Any:
        calls.append(len(tokens))
        return made(self, context, tokens, *rest, **named)

    monkeypatch.setattr(KeySpace, "text_pages", counted)
    added = add(llm, "long", [[100 + n % 200 for n in range(200)]], drawn(0, max_tokens=1))
    finish(llm)
    assert added.request.num_tokens == 200
    assert sum(calls) >= 12 * 16
    assert len(calls) <= 4


def test_keys_of_a_cached_beginning_are_made_at_once(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page by page those of 16,000 tokens took three times as long, in front of a first token."""
    llm, made = make_llm(checkpoint()), list[int]()
    text = words(1, 140)
    ask(llm, [text])
    pages = KeySpace.text_pages

    def counted(*args: Any, **more: Any) -> Any:
        made.append(len(found := pages(*args, **more)))
        return found

    monkeypatch.setattr(KeySpace, "text_pages", counted)
    (again,) = ask(llm, [text])
    assert again.output.reuse.text_tokens_cached >= 4 * llm.engine.config.cache.page_size
    assert len([some for some in made if some]) == 1
