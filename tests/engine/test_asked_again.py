"""What is asked for again from the pool stays in the tiers; pinned pages are nobody's room; answers
of slow readers take none."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from looseleaf import AsyncLLM, Document, SamplingParams, Select
from looseleaf.errors import PoolTooSmall
from looseleaf.prompt.request import Request, with_policies
from looseleaf.tiers import Entry
from tests.engine.harness import Folder, assert_idle, document, drawn, make_llm, words
from tests.engine.tiered import PARAMS, forget_pool, load_always, sources, tiered

ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@pytest.mark.parametrize("host_gib", [0.0, 0.0005])
def test_a_scan_does_not_drive_out_what_was_asked_for_again_from_the_pool(
    checkpoint: Folder, tmp_path: Path, host_gib: float
) -> None:
    llm = tiered(checkpoint(), tmp_path / "cache", disk_gib=0.0005, host_gib=host_gib)
    load_always(llm)
    tiers = llm.engine.tiers
    assert tiers is not None
    hot, once = document(100, 60), document(101, 60)
    for prompt in ([hot, words(1, 5)], [once, words(2, 5)], [hot, words(3, 5)]):
        llm.generate([prompt], PARAMS)
    assert tiers.flush(15)
    for number in range(14):
        llm.generate([[document(200 + number, 60), words(4, 5)]], PARAMS)
        assert tiers.flush(15)
    kept: list[list[Entry]] = [list(guard.tier.entries()) for guard in tiers.guards]
    assert all(0 < len(entries) < 14 for entries in kept)
    forget_pool(llm)
    again = llm.generate([[hot, words(5, 5)], [once, words(5, 5)]], PARAMS)
    assert [sources(output) for output in again] == [["loaded"], ["computed"]]
    llm.close()


def test_pages_that_others_have_pinned_are_no_room_for_an_answer(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), num_pages=12)
    engine, page = llm.engine, llm.engine.store.pool.page_size
    pinned = Document(words(1, 5 * page - 3))
    llm.register(pinned, pinned=True)
    held = engine.store.pinned_pages
    assert held >= 5
    (answer,) = llm.generate([[words(2, 4)]], ENDLESS)
    assert answer.outputs[0].finish_reason == "length"
    most = (12 - held) * page - 4
    assert len(answer.token_ids) == most
    with pytest.raises(PoolTooSmall, match="has 12, less those of pinned documents"):
        llm.generate([[words(2, 4)]], SamplingParams(max_tokens=most + page, ignore_eos=True))
    # who reads the pinned ones has their pages
    (chat,) = llm.chat([{"role": "user", "content": [pinned, words(3, 4)]}], ENDLESS)
    assert chat.outputs[0].finish_reason == "length"
    engine.check()


@pytest.mark.parametrize("policy", ["quest", "representatives", "partial"])
def test_a_mass_of_nothing_yet_is_read_and_harms_nobody(checkpoint: Folder, policy: Any) -> None:
    llm = make_llm(checkpoint())
    engine, page = llm.engine, llm.engine.store.pool.page_size
    few = words(1, 3)
    (plain,) = llm.generate([few], drawn(1, max_tokens=2 * page))
    request = Request("few", engine.prompts.from_parts(few), drawn(1, max_tokens=2 * page))
    added = engine.add(with_policies(request, select=Select(policy, mass=0.9)))
    other = engine.add(Request("other", engine.prompts.from_parts(words(2, 40)), drawn(2)))
    while engine.has_work:
        engine.step()
    assert added.error is None and other.error is None
    assert len(added.output().token_ids) == len(plain.token_ids)
    assert_idle(llm)


def test_who_reads_slowly_finds_the_newest_output(checkpoint: Folder) -> None:
    async def scenario() -> None:
        llm = AsyncLLM(checkpoint(), dtype="float32", device="cpu", num_pages=96)
        stream = llm.generate(words(1, 9), SamplingParams(max_tokens=60, ignore_eos=True))
        first = await anext(stream)
        while await llm.call(lambda engine: engine.has_work):
            pass
        left = [output async for output in stream]
        assert len(first.token_ids) < 60
        assert [len(output.token_ids) for output in left] == [60]
        await asyncio.to_thread(llm.close)

    asyncio.run(scenario())
