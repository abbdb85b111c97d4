"""No request bends the answer of another: discovered documents, blends, tiers and hosted chats.

An attacker sends any prompts of the victim's own pieces first. The victim's logits are then those
of an engine that has served no other request."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from looseleaf import LLM, SamplingParams
from looseleaf.config import Fuse, IndexConfig, Select
from looseleaf.prompt.cutting import Cutter
from looseleaf.prompt.discover import DiscoverLimits, Discovery, num_discovered
from looseleaf.prompt.request import DocumentPart, PromptParts, Request, TextPart
from tests.engine.harness import GREEDY, TOLERANCE, Folder, assert_idle, document, make_llm
from tests.engine.tiered import forget_pool, load_always, tiered
from tests.prompt.test_cutting import LINE_END, MARKER, SIZE, lines

LEAD = (2, 3, 4, 5, LINE_END, MARKER)
FILES = [lines(seed, 5) for seed in range(4)]
QUESTION = (9, 8, 7)
LIMITS = DiscoverLimits(2, 16, 8, 0.0)
FUSES = [None, Fuse("first", tokens=3), Fuse("deviation", ratio=0.4)]


def discovery() -> Discovery:
    ids = np.arange(512)
    flags = (ids == MARKER) & (ids < SIZE), (ids == LINE_END) & (ids < SIZE)
    return Discovery(Cutter(*flags, min_tokens=4, max_tokens=32, lines_per_cut=2, window=2), LIMITS)


def prompt(order: list[int], *more: int) -> PromptParts:
    tokens = [token for number in order for token in (*FILES[number], MARKER)]
    return (TextPart((*LEAD, *tokens, *more, *QUESTION)),)


def answer(
    llm: LLM, parts: PromptParts, salt: str, fuse: Fuse | None, select: Select | None = None
) -> tuple[Tensor, Any]:
    """The logits of a request, and its output."""
    recorder: Any = llm.engine.runner
    name = f"request {len(recorder.logits)}"
    progress = llm.engine.add(Request(name, parts, GREEDY, salt, fuse=fuse, select=select))
    while llm.engine.has_work:
        llm.engine.step()
    assert_idle(llm)
    return torch.stack(recorder.logits[name, 0]), progress.output()


ORDERS = st.lists(st.integers(0, len(FILES) - 1), min_size=1, max_size=4)
ATTACKS = st.lists(
    st.tuples(ORDERS, st.sampled_from(["red", "blue"]), st.integers(10, 60)), max_size=3
)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(attacks=ATTACKS, order=ORDERS, fuse=st.sampled_from(FUSES))
def test_an_attacker_never_changes_the_logits_of_a_victim(
    checkpoint: Folder, attacks: list[Any], order: list[int], fuse: Fuse | None
) -> None:
    index, llm = discovery(), make_llm(checkpoint())
    index.apply(prompt([*reversed(order)]), len(LEAD), "blue")
    for attacker_order, salt, junk in attacks:
        parts = index.apply(prompt(attacker_order, junk, junk), len(LEAD), salt)
        answer(llm, parts, salt, fuse)
    parts = index.apply(prompt(order), len(LEAD), "blue")
    logits, _ = answer(llm, parts, "blue", fuse)
    alone, _ = answer(make_llm(checkpoint()), parts, "blue", fuse)
    torch.testing.assert_close(logits, alone, rtol=0, atol=TOLERANCE)


def test_a_tenant_never_changes_the_form_or_the_sources_of_another(checkpoint: Folder) -> None:
    index, llm = discovery(), make_llm(checkpoint())
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        answer(llm, index.apply(prompt(order), len(LEAD), "red"), "red", None)
    parts = index.apply(prompt([2, 0, 1]), len(LEAD), "blue")
    assert num_discovered(parts) == 0
    _, output = answer(llm, parts, "blue", None)
    assert output.reuse.text_tokens_cached == 0
    moved = index.apply(prompt([1, 2, 0]), len(LEAD), "blue")
    _, output = answer(llm, moved, "blue", None)
    assert num_discovered(moved) > 0 and output.reuse.document_tokens_reused == 0


@pytest.mark.parametrize("fuse", FUSES, ids=["none", "first", "deviation"])
def test_pieces_of_a_shared_tier_are_those_of_no_prompt(
    checkpoint: Folder, tmp_path: Path, fuse: Fuse | None
) -> None:
    index, attacker = discovery(), tiered(checkpoint(), tmp_path)
    index.apply(prompt([0, 1]), len(LEAD), "blue")
    attack = index.apply(prompt([3, 1, 0], 40, 41), len(LEAD), "blue")
    answer(attacker, attack, "blue", fuse)
    forget_pool(attacker)
    attacker.close()
    victim = tiered(checkpoint(), tmp_path)
    load_always(victim)
    parts = index.apply(prompt([1, 0]), len(LEAD), "blue")
    logits, output = answer(victim, parts, "blue", fuse)
    assert "loaded" in {d.source for d in output.reuse.documents}
    alone, _ = answer(make_llm(checkpoint()), parts, "blue", fuse)
    torch.testing.assert_close(logits, alone, rtol=0, atol=TOLERANCE)
    victim.close()


def test_an_answer_is_read_only_after_its_whole_context(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint())
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    first = prompt([0, 1])
    answered = llm.generate([[[*first[0].tokens]]], params)[0]
    token_ids = answered.token_ids
    same = (TextPart((*first[0].tokens, *token_ids, *QUESTION)),)
    other = (TextPart((*prompt([1, 0])[0].tokens, *token_ids, *QUESTION)),)
    _, continued = answer(llm, same, "", None)
    _, moved = answer(llm, other, "", None)
    page = llm.engine.config.cache.page_size
    assert continued.reuse.text_tokens_cached > len(first[0].tokens) // page * page
    assert moved.reuse.text_tokens_cached <= len(LEAD)


def test_a_discovered_chat_beside_a_hosted_document_reads_its_own_pieces(
    checkpoint: Folder,
) -> None:
    index, select = discovery(), Select("retrieval", ratio=1.0)
    folder = checkpoint("llama", "dynamic")
    index.apply(prompt([0, 1]), len(LEAD), "")
    pieces = index.apply(prompt([1, 0]), len(LEAD), "")
    assert num_discovered(pieces) > 0
    book = document(1, 200, context="alone")

    def logits(attacked: bool) -> Tensor:
        llm = make_llm(folder, num_pages=256, max_model_len=1024)
        llm.host(book, index=IndexConfig("graph", sink=4, local=12, degree=8, top=20))
        parts = llm.engine.prompts.from_parts([book, [*QUESTION]])
        (hosted,) = [part for part in parts if isinstance(part, DocumentPart)]
        if attacked:
            answer(llm, (pieces[0], hosted, *pieces[1:]), "", None, select)
            answer(llm, index.apply(prompt([3, 0], 44), len(LEAD), ""), "", None)
        return answer(llm, (*pieces[:-1], hosted, pieces[-1]), "", None, select)[0]

    torch.testing.assert_close(logits(True), logits(False), rtol=0, atol=TOLERANCE)
