"""Two ranks answer as one: the same tokens from the same logits, up to rounding."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from looseleaf import LLM, Fuse, Grammar, IndexConfig, Revise, Select
from looseleaf.errors import DeadlineExceeded, InvalidRequest, PromptTooLong
from tests.engine.harness import (
    GREEDY,
    TOLERANCE,
    Answer,
    ask,
    assert_idle,
    assert_same_answers,
    document,
    drawn,
    make_llm,
    words,
)
from tests.engine.tiered import load_always
from tests.parallel.pair import Pair

Folder = Callable[..., Path]
# plain with biases; parallel residual and layer norms; fused projections; one KV head for both
# ranks, fused gates and norms after branches; capped scores; multipliers
FAMILIES = ("llama", "phi", "phi3", "glm4", "gemma2", "granite")
DOCUMENTS = [document(1, 40), document(2, 50), document(3, 30)]
PROMPT = [words(1, 20), *DOCUMENTS, words(2, 24)]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_answer_as_one(checkpoint: Folder, family: str) -> None:
    prompts = [words(0, 40), PROMPT]
    params = [GREEDY, drawn(5, 4, temperature=0.8, top_p=0.9)]
    single = make_llm(checkpoint(family))
    with Pair(checkpoint(family)) as pair:
        assert_same_answers(ask(pair.llm, prompts, params), ask(single, prompts, params))


@pytest.fixture(scope="module")
def both(checkpoint: Folder) -> Iterator[tuple[LLM, LLM]]:
    """An engine of two ranks, and one of one rank."""
    with Pair(checkpoint("llama")) as pair:
        yield pair.llm, make_llm(checkpoint("llama"))


POLICIES: dict[str, dict[str, Any]] = {
    "deviation": {"fuse": Fuse("deviation", ratio=0.3)},
    "question": {"fuse": Fuse("question", ratio=0.3)},
    "links": {"fuse": Fuse("links", ratio=0.4)},
    "quest": {"select": Select("quest", tokens=48, dense_layers=())},
    "h2o": {"select": Select("h2o", tokens=64, dense_layers=())},
    "retro": {
        "select": Select("quest", tokens=48, dense_layers=()),
        "revise": Revise(window=3),
    },
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies_choose_as_one_rank(both: tuple[LLM, LLM], name: str) -> None:
    # evicting policies take no documents
    prompt = words(7, 120) if name == "h2o" else PROMPT
    mine, other = (answer(llm, prompt, **POLICIES[name]) for llm in both)
    assert_same_answers([mine], [other])


def test_a_prefix_and_documents_are_found_again(both: tuple[LLM, LLM]) -> None:
    prompt = [words(11, 50), document(12, 40), words(13, 20)]
    for llm in both:
        answer(llm, prompt)
    mine, other = (answer(llm, prompt) for llm in both)
    assert mine.output.reuse == other.output.reuse
    assert (
        mine.output.reuse.text_tokens_cached and mine.output.reuse.documents[0].source == "cached"
    )
    assert_same_answers([mine], [other])


def test_several_outputs_and_scores_are_those_of_one_rank(both: tuple[LLM, LLM]) -> None:
    params = drawn(4, 5, n=3, logprobs=3, prompt_logprobs=2, presence_penalty=0.5)
    mine, other = (llm.generate([PROMPT], params)[0] for llm in both)
    assert [o.token_ids for o in mine.outputs] == [o.token_ids for o in other.outputs]
    scores = [
        [entry[0].logprob for entry in output.prompt_logprobs or () if entry is not None]
        for output in (mine, other)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=TOLERANCE)


def test_an_output_follows_a_grammar_that_rank_0_has(both: tuple[LLM, LLM]) -> None:
    params = drawn(9, 20, grammar=Grammar.regex("[ab]{4,9}c"))
    mine, other = (llm.generate([PROMPT], params)[0] for llm in both)
    assert mine.token_ids == other.token_ids
    assert mine.outputs[0].text.endswith("c")


def test_refused_requests_leave_the_ranks_together(both: tuple[LLM, LLM]) -> None:
    pair, single = both
    with pytest.raises(PromptTooLong):
        pair.generate([words(1, 400)], GREEDY)
    with pytest.raises(InvalidRequest):
        pair.generate([PROMPT], drawn(1, grammar=Grammar.regex("(")))
    with pytest.raises(DeadlineExceeded):
        pair.generate([PROMPT], drawn(1, 60), deadline=1e-6)
    assert_idle(pair)
    assert_same_answers([answer(pair, PROMPT)], [answer(single, PROMPT)])


def test_registered_documents_are_those_of_all_ranks(both: tuple[LLM, LLM]) -> None:
    infos = []
    for llm in both:
        text = document(20, 60, context="alone")
        info = llm.register(text, pinned=True)
        llm.generate([[text, words(1, 9)]], GREEDY)
        assert llm.engine.documents.unpin(info.id).hits == 1
        infos.append(llm.engine.documents.delete(info.id))
    mine, other = infos
    assert (mine.id, mine.num_pages, mine.hits) == (other.id, other.num_pages, other.hits)
    assert_idle(both[0])


def test_a_hosted_document_is_indexed_by_the_heads_of_each_rank(both: tuple[LLM, LLM]) -> None:
    select = Select("retrieval", tokens=32, dense_layers=())
    answers = []
    for llm in both:
        text = document(30, 90, context="alone")
        segment = llm.host(text, index=IndexConfig("flat", sink=4, local=12))
        answers.append(answer(llm, [text, words(3, 9)], select=select))
        assert llm.engine.hosting.forget(segment.key)
    assert_same_answers(answers[:1], answers[1:])


@pytest.mark.parametrize("where", ["host", "disk"])
def test_documents_load_on_every_rank(checkpoint: Folder, tmp_path: Path, where: str) -> None:
    tier = {"host_gib": 0.01} if where == "host" else {"disk_path": str(tmp_path / "tier")}
    prompt = [words(1, 9), document(41, 60), document(42, 50), words(2, 9)]
    plain = answer(make_llm(checkpoint("llama")), prompt)
    with Pair(checkpoint("llama"), **tier, staging_gib=0.01) as pair:
        load_always(pair.llm)
        first = answer(pair.llm, prompt)
        pair.forget_pool()
        loaded = answer(pair.llm, prompt)
        assert [d.source for d in loaded.output.reuse.documents] == ["loaded"] * 2
        # a document that one rank has lost is computed
        segments = pair.llm.engine.store.segments()
        lost = max(segments, key=lambda segment: segment.length).key
        pair.forget_pool()
        pair.other.tiers.delete([lost])
        assert pair.other.tiers.flush()
        mixed = answer(pair.llm, prompt)
        assert sorted(d.source for d in mixed.output.reuse.documents) == ["computed", "loaded"]
    assert_same_answers([first, loaded, mixed], [plain] * 3)


def answer(llm: LLM, prompt: Any, **policies: Any) -> Answer:
    """The answer to one prompt, with its logits."""
    [output] = llm.generate([prompt], GREEDY, **policies)
    assert_idle(llm)
    recorder: Any = llm.engine.runner
    return Answer(output, torch.stack(recorder.logits[output.request_id, 0]))
