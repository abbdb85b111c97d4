"""Policies that throw keys away: what they keep, what an answer is then, which pages go."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from looseleaf import LLM, Document, SamplingParams, Select
from looseleaf.config import EVICTING, Revise
from looseleaf.engine.runner.eviction import EvictedKeys
from looseleaf.errors import InvalidOption, InvalidRequest
from looseleaf.sparse import make_evictor
from looseleaf.sparse.evictors import H2O, SnapKV, Tova
from tests.checkpoints import make_checkpoint
from tests.engine.harness import TOLERANCE, assert_idle, make_llm, words, worst
from tests.retro.dense import DenseRetro

EVICTOR = pytest.mark.parametrize("policy", EVICTING)
PARAMS = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)
PROMPT = [words(1, 150)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama")


def answer(llm: LLM, prompt: Any = PROMPT, **policies: Any) -> tuple[tuple[int, ...], Tensor]:
    (output,) = llm.generate([prompt], PARAMS, **policies)
    assert_idle(llm)
    recorder: Any = llm.engine.runner
    return output.token_ids, torch.stack(recorder.logits[output.request_id, 0])


@EVICTOR
def test_a_capacity_for_everything_equals_dense_decode(folder: Any, policy: Any) -> None:
    dense = answer(make_llm(folder))
    kept = answer(make_llm(folder), select=Select(policy, tokens=250))
    assert dense[0] == kept[0] and worst(dense[1], kept[1]) <= TOLERANCE


@EVICTOR
def test_a_larger_capacity_keeps_no_less_of_the_attention(policy: Any) -> None:
    """Of what the newest token attends to, and of what all tokens attended to so far."""
    generator = torch.Generator().manual_seed(4)
    weights = (torch.randn(32, 2, 3, 300, generator=generator) * 3).softmax(-1)
    before = None
    for tokens in (8, 16, 40, 100, 250):
        evictor = make_evictor(Select(policy, tokens=tokens), 300)
        assert evictor is not None
        some = weights[-evictor.rows(len(weights), True) :]
        kept = evictor.keep(evictor.scores(torch.zeros(2, 300), some))
        assert kept.shape == (2, tokens)
        index = kept[None, :, None].expand(32, 2, 3, -1)
        held = weights.gather(-1, index).sum(-1)
        assert before is None or (held >= before - 1e-6).all()
        before = held


@EVICTOR
def test_an_output_never_holds_more_than_its_capacity_and_what_is_new(
    folder: Any, policy: Any
) -> None:
    llm = make_llm(folder)
    engine: Any = llm.engine
    most = 0
    step = engine.step

    def watched() -> Any:
        nonlocal most
        changed = step()
        engine.check()
        decoding = [s for s in engine._scheduler.running if len(s.output_token_ids) > 1]
        most = max([most, *(len(s.tail.pages) for s in decoding)])
        return changed

    engine.step = watched
    answer(llm, select=Select(policy, tokens=64))
    # SnapKV keeps what it generates: 40 tokens more
    assert most == (7 if policy == "snapkv" else 5)


@EVICTOR
def test_a_small_capacity_changes_the_answer_but_not_the_first_token(
    folder: Any, policy: Any
) -> None:
    dense = answer(make_llm(folder))[1]
    kept = answer(make_llm(folder), select=Select(policy, tokens=32))[1]
    assert worst(dense[:1], kept[:1]) <= TOLERANCE
    assert worst(dense[1:2], kept[1:2]) > 10 * TOLERANCE


@EVICTOR
def test_others_in_the_batch_are_untouched(folder: Any, policy: Any) -> None:
    llm = make_llm(folder)
    prompts = [[words(n, 90)] for n in range(3)]
    alone = [answer(llm, p, select=Select(policy, tokens=48))[0] for p in prompts]
    outputs = llm.generate(prompts, PARAMS, select=Select(policy, tokens=48))
    assert [o.token_ids for o in outputs] == alone
    plain = answer(llm, prompts[0])[0]
    assert plain == answer(make_llm(folder), prompts[0])[0]


@EVICTOR
def test_preemption_and_resumption_change_nothing(folder: Any, policy: Any) -> None:
    """Who made room throws the same keys away again."""
    prompts, found = [[words(n, 30)] for n in range(5)], []
    for num_pages in (96, 14):
        llm = make_llm(folder, num_pages=num_pages)
        outputs = llm.generate(prompts, PARAMS, select=Select(policy, tokens=48))
        assert_idle(llm)
        recorder: Any = llm.engine.runner
        last = [recorder.logits[output.request_id, 0][-1] for output in outputs]
        found.append(([output.token_ids for output in outputs], torch.stack(last)))
        assert (llm.engine.counters.preemptions > 0) == (num_pages < 96)
    (tokens, logits), (others, again) = found
    assert tokens == others and worst(logits, again) <= TOLERANCE


@EVICTOR
def test_pages_that_hold_nothing_any_more_are_given_back(
    folder: Any, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(folder)
    seen: list[tuple[int, ...]] = []
    evict = EvictedKeys.computed

    def watched(feature: EvictedKeys, sequence: Any, *, ends_prompt: bool) -> None:
        before = sequence.num_evicted
        evict(feature, sequence, ends_prompt=ends_prompt)
        if sequence.num_evicted > before:
            seen.append((sequence.tail.computed - sequence.num_evicted, len(sequence.tail.pages)))

    monkeypatch.setattr(EvictedKeys, "computed", watched)
    answer(llm, select=Select(policy, tokens=48))
    assert seen and all(left == 48 and pages == 3 for left, pages in seen)


@EVICTOR
def test_a_prompt_in_chunks_keeps_the_same(folder: Any, policy: Any) -> None:
    select = Select(policy, tokens=48)
    whole = answer(make_llm(folder), select=select)
    cut = answer(make_llm(folder, max_num_batched_tokens=68, max_num_seqs=8), select=select)
    assert whole[0] == cut[0] and worst(whole[1], cut[1]) <= TOLERANCE


def test_snapkv_keeps_what_its_observers_attend_to() -> None:
    policy = SnapKV(capacity=6, observed=2, pool=1)
    weights = torch.zeros(2, 1, 2, 12)
    weights[..., [1, 4, 7, 8]] = 0.25
    kept = policy.keep(policy.scores(torch.zeros(1, 12), weights))
    assert kept.tolist() == [[1, 4, 7, 8, 10, 11]]
    assert policy.rows(100, False) == 0 and policy.rows(100, True) == 2


def test_tova_keeps_the_same_keys_in_all_heads() -> None:
    policy = Tova(capacity=3)
    weights = torch.tensor([[0.6, 0.3, 0.1, 0.0, 0.0], [0.0, 0.1, 0.1, 0.8, 0.0]])
    kept = policy.keep(policy.scores(torch.zeros(2, 5), weights[None, :, None]))
    assert kept.tolist() == [[0, 3, 4]] * 2


def test_h2o_adds_up_and_keeps_the_newest_half() -> None:
    policy = H2O(capacity=4)
    scores = policy.scores(torch.tensor([[0.0, 5.0, 0.0, 0.0, 0.0, 0.0]]), torch.ones(3, 1, 2, 6))
    scores[0, 0] += 1
    assert policy.keep(scores).tolist() == [[0, 1, 4, 5]]


@pytest.mark.parametrize(
    ("prompt", "more", "reason"),
    [
        ([Document("a b"), "c"], {}, "documents are read by others"),
        (["c"], {"revise": Revise(2)}, "leave revise out"),
    ],
)
def test_what_has_no_meaning_is_refused(
    folder: Any, prompt: Any, more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        make_llm(folder).generate([prompt], PARAMS, select=Select("tova", tokens=32), **more)


def test_a_model_with_windows_is_refused(tmp_path: Any) -> None:
    llm = make_llm(make_checkpoint(tmp_path / "mistral", "mistral"))
    with pytest.raises(InvalidRequest, match="see a window"):
        llm.generate(["abc"], PARAMS, select=Select("h2o", tokens=32))


@EVICTOR
def test_a_share_is_one_of_the_prompt(folder: Any, policy: Any) -> None:
    llm = make_llm(folder)
    (text,) = llm.engine.prompts.from_parts(PROMPT)
    share, number = (
        answer(llm, select=Select(policy, **budget))
        for budget in ({"ratio": 47.5 / len(text.tokens)}, {"tokens": 48})
    )
    assert share[0] == number[0] and torch.equal(share[1], number[1])


def test_a_mass_is_no_number_of_keys() -> None:
    with pytest.raises(InvalidOption, match="give tokens or ratio"):
        Select("snapkv", mass=0.9)


def test_rows_read_what_was_kept_from_where_it_stood(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is kept: each later row is attention over it and what came since."""
    llm = make_llm(folder)
    (part,) = llm.engine.prompts.from_parts(PROMPT)
    length = len(part.tokens)
    kept = torch.arange(length)[torch.arange(length) % 3 != 1][-48:]
    monkeypatch.setattr(SnapKV, "keep", lambda self, scores: kept.expand(len(scores), -1))
    tokens, logits = answer(llm, select=Select("snapkv", tokens=48))

    def choose(retro: DenseRetro, layer: int, q: Tensor, sealed: int) -> list[set[int]]:
        return [{*kept.tolist(), *range(length, sealed)}] * retro.config.num_kv_heads

    model: Any = llm.engine.runner.model
    plain = DenseRetro(model.config, 1, [], 0, choose)
    expected = [plain.prefill(model, list(part.tokens))]
    expected += [plain.step(model, [*part.tokens, *tokens[:n]]) for n in range(1, 12)]
    assert worst(logits[:12], torch.stack(expected)) <= TOLERANCE


@EVICTOR
def test_a_report_does_not_say_that_everything_was_read(folder: Any, policy: Any) -> None:
    (output,) = make_llm(folder).generate(PROMPT, PARAMS, select=Select(policy, tokens=32))
    assert str(output.select).startswith(f"select: {policy}, tokens 32; keys are thrown away")
