"""What it takes to look at who waits does not grow with the line, nor with the steps it waits."""

from typing import Any

import pytest

from looseleaf import LLM
from looseleaf.engine.admission import Admission
from looseleaf.engine.progress import RequestProgress
from looseleaf.prompt.request import Prompt, Request
from tests.engine.harness import GREEDY, Folder, ask, assert_idle, drawn, make_llm, words

BEGINNING = words(1, 150)
SMALL_STEPS: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 12}


def add(llm: LLM, name: str, prompt: Prompt, max_tokens: int = 3) -> RequestProgress:
    parts = llm.engine.prompts.from_parts(prompt)
    return llm.engine.add(Request(name, parts, drawn(0, max_tokens)))


def finish(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check()
    assert_idle(llm)


class Looks:
    """Counts how often pages that a run could reuse were looked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        hit_pages = Admission._hit_pages

        def counted(*args: Any) -> Any:
            self.count += 1
            return hit_pages(*args)

        monkeypatch.setattr(Admission, "_hit_pages", counted)

    def of_step(self, llm: LLM) -> int:
        self.count = 0
        llm.engine.step()
        return self.count


def test_a_long_line_that_wants_one_beginning_costs_a_step_no_more_than_a_short_one(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = {}
    for length in (20, 200):
        llm = make_llm(checkpoint(), num_pages=400, **SMALL_STEPS)
        added = [add(llm, f"r{n}", BEGINNING + words(n, 9)) for n in range(length)]
        with monkeypatch.context() as patch:
            looks = Looks(patch)
            while not added[0].output().token_ids:
                most[length] = max(most.get(length, 0), looks.of_step(llm))
        finish(llm)
        # they have waited for it, and so they find it
        cached = {one.output().reuse.text_tokens_cached for one in added[1:]}
        assert min(cached) >= 128
    assert most[200] <= most[20]


def test_who_wants_something_else_passes_a_line_that_waits(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), num_pages=400, **SMALL_STEPS)
    first = add(llm, "first", BEGINNING + words(1, 9))
    others = [add(llm, f"r{n}", BEGINNING + words(n, 9)) for n in range(2, 8)]
    stranger = add(llm, "stranger", words(99, 9))
    for _ in range(3):
        llm.engine.step()
    assert stranger.metrics.admitted is not None
    assert not first.output().token_ids
    assert all(one.metrics.admitted is None for one in others)
    finish(llm)


def test_who_found_too_few_pages_is_not_looked_at_before_some_are_free(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(checkpoint(), num_pages=20)
    prompt = words(2, 200)
    (alone,) = ask(llm, [prompt], GREEDY)
    llm.engine.store.evict_idle()
    first = add(llm, "first", words(3, 150), max_tokens=60)
    llm.engine.step()
    second = llm.engine.add(Request("second", llm.engine.prompts.from_parts(prompt), GREEDY))
    llm.engine.step()
    looks, seen = Looks(monkeypatch), 0
    while not first.finished:
        assert second.metrics.admitted is None
        seen += looks.of_step(llm)
    assert seen <= 3
    finish(llm)
    assert second.output().token_ids == alone.token_ids


def test_pages_that_come_back_are_found_by_who_waits_for_them(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), num_pages=20)
    long, short = add(llm, "long", words(3, 100), 60), add(llm, "short", words(4, 100), 20)
    llm.engine.step()
    third = add(llm, "third", words(2, 150))
    while not short.finished:
        assert third.metrics.admitted is None
        llm.engine.step()
    llm.engine.step()
    assert third.metrics.admitted is not None and not long.finished
    finish(llm)
