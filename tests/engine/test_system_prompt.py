"""A service's system prompt: computed ahead, pinned, in front of every chat, read once a batch."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from looseleaf import LLM, SamplingParams
from looseleaf.errors import EngineFault, InvalidOption, InvalidRequest, PoolTooSmall
from looseleaf.prompt.request import Request, SystemPrompt
from tests.checkpoints import write_tokenizer
from tests.engine.harness import GREEDY, Folder, assert_idle, document, drawn, make_llm, words

SERVICE = words(7, 60)
A, B = document(1, 40), document(2, 20)


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


@pytest.fixture
def llm(checkpoint: Folder) -> LLM:
    return make_llm(checkpoint(), system_prompt=SERVICE)


def own_prompt(llm: LLM) -> SystemPrompt:
    assert llm.system_prompt is not None
    return llm.system_prompt


def test_it_is_computed_before_the_first_chat_and_survives_eviction(llm: LLM) -> None:
    page_size = llm.engine.store.pool.page_size
    full = len(own_prompt(llm).tokens) // page_size
    assert full >= 3
    llm.engine.store.evict_idle()
    counts = llm.engine.store.page_counts
    assert (counts.pinned, counts.free) == (full, counts.total - full)
    (output,) = llm.chat([user("who?")], GREEDY)
    assert output.reuse.text_tokens_cached == full * page_size
    llm.engine.check()


@pytest.mark.parametrize("own", [None, "Be brief.", [A, "Be brief."]], ids=["none", "text", "list"])
def test_a_chat_behind_it_is_the_chat_with_its_text_written_out(
    checkpoint: Folder, llm: LLM, own: Any
) -> None:
    plain = make_llm(checkpoint())
    written = (
        [SERVICE] if own is None else [SERVICE + "\n\n", *([own] if own == "Be brief." else own)]
    )
    behind = (
        [user(A, B, "who?")]
        if own is None
        else [{"role": "system", "content": own}, user(A, B, "who?")]
    )
    (mine,) = llm.chat(behind, GREEDY)
    (theirs,) = plain.chat([{"role": "system", "content": written}, user(A, B, "who?")], GREEDY)
    assert mine.prompt_token_ids == theirs.prompt_token_ids
    assert mine.token_ids == theirs.token_ids
    assert mine.reuse.text_tokens_cached > theirs.reuse.text_tokens_cached == 0


def test_one_computation_serves_every_salt_and_gives_away_nothing_else(llm: LLM) -> None:
    llm.chat([user(A, words(11, 60))], GREEDY, salt="one")
    (other,) = llm.chat([user(A, words(11, 60))], GREEDY, salt="two")
    page_size = llm.engine.store.pool.page_size
    full = len(own_prompt(llm).tokens) // page_size
    assert other.reuse.text_tokens_cached == full * page_size
    assert [d.source for d in other.reuse.documents] == ["computed"]


def test_the_same_words_from_a_tenant_are_the_tenants_own(llm: LLM) -> None:
    """Who writes the service's text himself finds out nothing: those are pages of his salt."""
    written = [{"role": "system", "content": SERVICE}, user("who?")]
    parts = llm.engine.prompts.from_messages(written)
    assert getattr(parts[0], "num_shared", 0) == 0
    (output,) = llm.generate([[list(parts[0].tokens)]], GREEDY, salt="tenant")
    assert output.reuse.text_tokens_cached == 0


def test_a_batch_reads_it_once(llm: LLM) -> None:
    """Rows of different tenants share the read of its pages, and of nothing else."""
    engine = llm.engine
    params = drawn(3, max_tokens=8)
    chats = [
        engine.prompts.from_messages([user(words(20 + n, 9))], own_prompt(llm)) for n in range(4)
    ]
    for n, parts in enumerate(chats):
        engine.add(Request(f"chat {n}", parts, params, salt=f"tenant {n}"))
    while not all(
        o.sequence.num_computed >= o.sequence.num_prompt_tokens for o in engine._outputs.values()
    ):
        engine.step()
    engine.step()
    stats = engine.last_step
    assert stats is not None
    assert (stats.decode_rows, stats.grouped_items, stats.grouped_rows) == (4, 1, 4)
    while engine.has_work:
        changed = engine.step()
    full = len(own_prompt(llm).tokens) // 16 * 16
    path = changed[0].output().attention
    assert path.decode_steps == path.grouped_steps == 7
    assert path.keys_shared == 7 * full
    assert path.keys_read == sum(len(chats[0][0].tokens) + n for n in range(1, 8))


def test_several_can_be_held_for_several_services(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint())
    texts = [words(31, 60), words(32, 80)]
    prompts = [llm.hold_system_prompt(text) for text in texts]
    llm.engine.store.evict_idle()
    for prompt in prompts:
        (output,) = llm.chat([user("who?")], GREEDY, system_prompt=prompt)
        assert output.reuse.text_tokens_cached == len(prompt.tokens) // 16 * 16
        assert tuple(output.prompt_token_ids[: len(prompt.tokens)]) == prompt.tokens
    (output,) = llm.chat([user("who?")], GREEDY)
    assert output.reuse.text_tokens_cached == 0


def test_what_cannot_be_held_is_refused(checkpoint: Folder) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        make_llm(checkpoint(), system_prompt=" ")
    with pytest.raises(InvalidOption, match="prefix_caching"):
        make_llm(checkpoint(), system_prompt=SERVICE, prefix_caching=False)
    with pytest.raises(InvalidRequest, match="context holds"):
        make_llm(checkpoint(), system_prompt=words(1, 300))


@pytest.mark.usefixtures("unchecked")
def test_a_conversation_takes_one_that_is_held_and_no_text(llm: LLM) -> None:
    text: Any = SERVICE
    with pytest.raises(InvalidRequest, match="hold_system_prompt"):
        llm.chat([user("who?")], GREEDY, system_prompt=text)
    with pytest.raises(InvalidRequest, match="hold_system_prompt"):
        llm.register(document(4), system_prompt=text)


def test_one_that_would_fill_the_pool_is_refused_and_pins_nothing(checkpoint: Folder) -> None:
    prompts = make_llm(checkpoint()).engine.prompts
    size = next(n for n in range(60, 240) if len(prompts.system_prompt("x" * n).tokens) == 96)
    llm = make_llm(checkpoint(), num_pages=96 // 16)
    with pytest.raises(PoolTooSmall, match="enlarge the pool"):
        llm.hold_system_prompt("x" * size)
    assert llm.engine.store.page_counts.pinned == 0
    assert_idle(llm)
    assert llm.generate([words(3, 40)], GREEDY)[0].token_ids


def test_documents_behind_it_are_computed_once_for_all_chats(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    llm.chat([user(A, B, "who?")], params)
    (output,) = llm.chat(
        [user("Hello."), {"role": "assistant", "content": "Hi."}, user("See", B, A, "when?")],
        params,
    )
    assert [d.source for d in output.reuse.documents] == ["cached", "cached"]


def test_a_template_without_a_place_for_it_is_told(checkpoint: Folder, tmp_path: Path) -> None:
    """Rather than a service whose rules nobody reads."""
    folder = tmp_path / "deaf"
    shutil.copytree(checkpoint(), folder)
    write_tokenizer(
        folder,
        chat_template="{% for m in messages if m['role'] != 'system' %}<|user|>{{ m['content'] }}"
        "{% endfor %}",
    )
    with pytest.raises(InvalidRequest, match="leaves system messages out"):
        make_llm(folder, system_prompt=SERVICE)


def test_a_fault_while_it_is_computed_is_told(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(checkpoint(), max_num_batched_tokens=16, max_num_seqs=4)
    run, calls = llm.engine.runner.run, []

    def fail_late(work: Any) -> Any:
        calls.append(work)
        return run(work) if len(calls) < 3 else 1 / 0

    monkeypatch.setattr(llm.engine.runner, "run", fail_late)
    with pytest.raises(EngineFault):
        llm.hold_system_prompt(SERVICE)
    assert_idle(llm)
