"""Laws 4 and 6 for blended requests, in fp32, each with every kind of attention."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from looseleaf import LLM, Fuse
from looseleaf.blend import fusion as fusions
from looseleaf.blend.token_scoring import TokenScoring
from looseleaf.config import FuseSelector
from looseleaf.engine.sequence import Phase
from looseleaf.engine.sequence import Sequence as OneOutput
from looseleaf.prompt.request import Part, Request
from tests.checkpoints import ATTENTION_FAMILIES
from tests.engine.fused import (
    LEAD,
    PARAMS,
    SEVERAL,
    Blended,
    blend,
    blend_all,
    read_as_text,
    same,
)
from tests.engine.harness import TOLERANCE, Folder, assert_idle, document, make_llm, words, worst

pytestmark = pytest.mark.parametrize("family", ATTENTION_FAMILIES)

SELECTORS: tuple[FuseSelector, ...] = ("random", "question", "links", "deviation")
# one that takes no pass to choose, one that takes several, one that computes as it chooses
POLICIES = [Fuse(s, ratio=0.3) for s in ("random", "links", "deviation")]
EVERY_POLICY = pytest.mark.parametrize("fuse", POLICIES, ids=lambda fuse: fuse.selector)

Cold = Callable[[str], LLM]


@pytest.fixture(scope="module")
def engines(checkpoint: Folder) -> dict[str, LLM]:
    return {family: make_llm(checkpoint(family)) for family in ATTENTION_FAMILIES}


@pytest.fixture
def cold(engines: dict[str, LLM]) -> Cold:
    """``cold(family)``: an engine that holds nothing."""

    def emptied(family: str) -> LLM:
        llm = engines[family]
        llm.engine.store.evict_idle()
        assert not list(llm.engine.store.segments())
        return llm

    return emptied


@pytest.mark.parametrize("selector", ["all", *SELECTORS])
def test_a_ratio_of_1_is_full_prefill(cold: Cold, family: str, selector: Any) -> None:
    llm = cold(family)
    mine = blend(llm, SEVERAL, Fuse(selector) if selector == "all" else Fuse(selector, ratio=1.0))
    assert mine.recomputed == [0, *(d.num_tokens for d in mine.output.reuse.documents[1:])]
    same(replace(mine, chosen=[]), blend(llm, read_as_text(SEVERAL), None))


def test_a_ratio_of_0_is_plain_reuse(cold: Cold, family: str) -> None:
    """Without a pass, and with one that nothing is chosen for."""
    llm = cold(family)
    plain = blend(llm, SEVERAL, None)
    nothing = [Fuse("none"), Fuse("first", tokens=0), *(Fuse(s, ratio=0.0) for s in SELECTORS)]
    for fuse in [*nothing, Fuse("question", threshold=99.0), Fuse("deviation", threshold=99.0)]:
        same(blend(llm, SEVERAL, fuse), plain)


def test_full_prefill_a_blend_and_plain_reuse_are_three_things(cold: Cold, family: str) -> None:
    """Else the tests above could not tell one from the other."""
    llm = cold(family)
    full, plain = blend(llm, read_as_text(SEVERAL), None), blend(llm, SEVERAL, None)
    some = blend(llm, SEVERAL, Fuse("first", tokens=3))
    for one, other in ((full, plain), (full, some), (plain, some)):
        assert worst(one.logits[:1], other.logits[:1]) > 10 * TOLERANCE


@pytest.mark.parametrize("fuse", [Fuse("all"), Fuse("random", ratio=0.3)], ids=str)
def test_a_later_key_changes_no_earlier_row(cold: Cold, family: str, fuse: Fuse) -> None:
    """Patch and text in front of a document are the same bits whatever it says."""
    kept = []
    for last in (document(3, 19), document(4, 19)):
        llm = cold(family)
        sequence = prefilled(llm, [*SEVERAL[:4], last, words(2, 9)], fuse)
        fusion = sequence.fusion
        assert fusion is not None
        before = fusion.rows.positions < fusion.documents[-1].start
        assert any(fusion.rows.positions > fusion.documents[-1].start)
        pages = pages_at(llm, fusion.rows.table[1][before])
        kept.append((fusion.rows.positions[before].tolist(), pages))
        llm.engine.abort("a")
        assert_idle(llm)
    assert kept[0][0] == kept[1][0] and len(kept[0][0]) > 5
    assert torch.equal(kept[0][1], kept[1][1])


def prefilled(llm: LLM, prompt: list[Part], fuse: Fuse) -> OneOutput:
    """Request "a" with its prompt computed and its pages still held."""
    parts = llm.engine.prompts.from_parts(prompt)
    sequence = llm.engine.add(Request("a", parts, PARAMS, fuse=fuse)).outputs[0].sequence
    while sequence.phase is not Phase.DECODE:
        llm.engine.step()
    return sequence


def pages_at(llm: LLM, slots: Any) -> Tensor:
    """Keys and values of all layers at some slots."""
    pool, at = llm.engine.store.pool, torch.from_numpy(slots)
    return pool.kv[:, :, at // pool.page_size, :, at % pool.page_size]


@EVERY_POLICY
def test_a_document_in_its_true_prefix_has_nothing_to_choose(
    cold: Cold, family: str, fuse: Fuse
) -> None:
    llm = cold(family)
    prompt = [LEAD, document(1, 23), words(2, 9)]
    mine = blend(llm, prompt, fuse)
    same(mine, blend(llm, prompt, None))
    assert mine.recomputed == [0] and mine.output.reuse.fuse is None


def test_in_its_true_prefix_a_document_deviates_by_rounding_only(
    cold: Cold, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured, not known from where it stands; elsewhere every document deviates."""
    monkeypatch.setattr(fusions, "is_exact", lambda use: False)
    measured: list[Tensor] = []
    deviations = TokenScoring._deviations

    def listen(self: TokenScoring, *given: Any) -> Tensor:
        measured.append(deviations(self, *given))
        return measured[-1]

    monkeypatch.setattr(TokenScoring, "_deviations", listen)
    llm = cold(family)
    fuse = Fuse("deviation", threshold=1e-3, check_layers=(2,))
    prompt = [LEAD, document(1, 23), document(2, 21), words(2, 9)]
    answer = blend(llm, prompt, fuse)
    first, second = measured[0].split([d.num_tokens for d in answer.output.reuse.documents])
    assert first.max() < 1e-5
    assert second.median() > 1e-2
    assert answer.recomputed[0] == 0 and answer.recomputed[1] > 0


@EVERY_POLICY
def test_the_answer_does_not_depend_on_what_was_asked_before(
    cold: Cold, family: str, fuse: Fuse
) -> None:
    """Cold, and behind the same documents in another order, blended and not; with text of whole
    pages, which nobody else may take for a prefix of theirs."""
    prompt = [*SEVERAL, words(8, 40)]
    expected = blend(cold(family), prompt, fuse)
    plain = blend(cold(family), prompt, None)
    number = POLICIES.index(fuse)
    order = [*permutations([SEVERAL[1], SEVERAL[2], SEVERAL[5]])][2 * number + 1]
    llm = cold(family)
    other = [None, *POLICIES][number]
    blend(llm, [LEAD, *order, words(7, 6)], other)
    blend(llm, prompt, other)
    warm = blend(llm, prompt, fuse)
    assert {d.source for d in warm.output.reuse.documents} == {"cached"}
    same(warm, expected)
    same(blend(llm, prompt, None), plain)


@EVERY_POLICY
def test_holes_and_hits_give_the_same_answer(cold: Cold, family: str, fuse: Fuse) -> None:
    """Nothing cached, a hole in the middle, a hole at both ends, and everything cached."""
    three = [document(1, 23), document(3, 19), document(2, 17)]
    prompt = [LEAD, *three, words(2, 6)]
    expected = blend(cold(family), prompt, fuse)
    for cached in ([0, 2], [1], [0, 1, 2]):
        llm = cold(family)
        for n in cached:
            blend(llm, [LEAD, three[n], words(7, 4)], None)
        answer = blend(llm, prompt, fuse)
        sources = ["cached" if n in cached else "computed" for n in range(3)]
        assert [d.source for d in answer.output.reuse.documents] == sources
        same(answer, expected)


@EVERY_POLICY
def test_a_document_of_no_token_changes_nothing(cold: Cold, family: str, fuse: Fuse) -> None:
    """Text that is nothing but spaces is refused; tokens of one's own may be none."""
    llm = cold(family)
    prompt = [LEAD, document(1, 23), document(3, 19), words(2, 6)]
    empty = replace(document(9), token_ids=())
    expected = blend(llm, prompt, fuse)
    for place in (1, 2, 3):
        answer = blend(llm, [*prompt[:place], empty, *prompt[place:]], fuse)
        assert answer.recomputed[place - 1] == 0
        same(answer, expected)


@pytest.mark.parametrize("fuse", [Fuse("all"), Fuse("first", tokens=3)], ids=str)
@pytest.mark.parametrize("length", [1, 15, 17])
def test_documents_may_be_shorter_than_a_page(
    cold: Cold, family: str, fuse: Fuse, length: int
) -> None:
    """Computed again as a whole they are full prefill; in part, what is asked for."""
    llm = cold(family)
    texts: Sequence[Part] = [
        replace(document(n), token_ids=tuple(range(9 + n, 9 + n + length))) for n in (1, 2, 3)
    ]
    prompt = [LEAD, *texts, words(2, 6)]
    answer = blend(llm, prompt, fuse)
    most = length if fuse.selector == "all" else min(length, 3)
    assert answer.recomputed == [0, most, most]
    if most == length:
        same(replace(answer, chosen=[]), blend(llm, read_as_text(prompt), None))
    else:
        same(answer, blend(cold(family), prompt, fuse))


@EVERY_POLICY
def test_one_document_at_two_offsets_in_one_batch_has_two_patches(
    cold: Cold, family: str, fuse: Fuse
) -> None:
    twice = document(1, 23)
    asked: list[tuple[list[Part], Fuse]] = [
        ([LEAD, document(2, 9), twice, words(2, 6)], fuse),
        ([LEAD, document(3, 14), document(2, 9), twice, words(5, 8)], fuse),
    ]
    alone = [blend(cold(family), *one) for one in asked]
    llm = cold(family)
    together = blend_all(llm, asked)
    for mine, expected in zip(together, alone, strict=True):
        same(mine, expected)
    offsets = [answer.output.reuse.documents[-1].offset for answer in together]
    assert offsets[0] != offsets[1]
    first, second = map(places_in_last, together)
    # what deviates may be the same tokens, with other keys and values
    assert first and second and (first != second or fuse.selector == "deviation")


def places_in_last(answer: Blended) -> list[int]:
    """The tokens of the last document that were computed again, as places in it."""
    last = answer.output.reuse.documents[-1]
    return [at - last.offset for at in answer.chosen if 0 <= at - last.offset < last.num_tokens]
