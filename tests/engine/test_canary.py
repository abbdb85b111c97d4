"""The canary: fused answers checked against full prefill; ratios rise where they differ."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from looseleaf import LLM, Fuse, SamplingParams
from looseleaf.engine.canary import RAISE, WINDOW, _Case
from looseleaf.errors import InvalidOption
from looseleaf.llm.llm import make_config
from looseleaf.prompt.request import Part, Request, TextPart
from tests.engine.harness import Folder, assert_idle, document, make_llm, words

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
# unlike a random model's likeliest tokens, drawn ones depend on what documents say
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def ask(llm: LLM, number: int, fuse: Fuse | None, params: SamplingParams = PARAMS) -> Any:
    """One question about two documents; then all that is left to do in the background."""
    prompt: Sequence[Part] = [words(1, 9), document(number), document(number + 100), words(3, 6)]
    (output,) = llm.generate([prompt], params, fuse=fuse)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check()
    assert_idle(llm)
    return output


@pytest.mark.parametrize("params", [GREEDY, PARAMS])
def test_full_prefill_agrees_with_itself_however_tokens_are_drawn(
    checkpoint: Folder, params: SamplingParams
) -> None:
    llm = make_llm(checkpoint("llama"), canary_share=1.0)
    for number in range(3):
        ask(llm, number, Fuse("all"), params)
    sums = llm.engine.counters
    assert (sums.canaries, sums.canaries_agreed, sums.canary_raises) == (3, 3, 0)
    # it is nobody's request, and finds nothing that counts
    assert sums.requests == sums.finished == 3
    assert sums.documents_computed == 6 and sums.text_tokens < 200


def test_what_never_agrees_raises_budgets_to_everything_and_no_further(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint("llama"), canary_share=1.0)
    canary = llm.engine._canary
    asked = Request("one", (TextPart((5,)),), GREEDY, fuse=Fuse("first", tokens=3))
    told = llm.engine.add(asked)
    for _ in range(WINDOW * 2000):
        canary._running = _Case(asked, (2,))
        canary._settle(told)
    fuse = canary.adjusted(asked).fuse
    assert fuse is not None and fuse.tokens is not None
    assert 10**6 <= fuse.tokens < 10**9


def test_ratios_rise_until_enough_answers_agree(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint("llama"), canary_share=1.0, canary_bound=0.9)
    fuse, sums = Fuse("random", ratio=0.3), llm.engine.counters
    ratios, agreed = [], [0.0]
    while agreed[-1] < 0.9 and len(ratios) < 6:
        before = sums.canaries_agreed
        number = WINDOW * len(ratios)
        told = [ask(llm, number + n, fuse).reuse.fuse.ratio for n in range(WINDOW)]
        assert len(set(told)) == 1
        ratios.append(told[0])
        agreed.append((sums.canaries_agreed - before) / WINDOW)
    # each time that too few agreed it rose; what is computed again more often is right more often
    assert ratios == pytest.approx([min(1.0, 0.3 * RAISE**n) for n in range(len(ratios))])
    assert len(ratios) >= 3 and agreed[-1] >= 0.9
    assert sums.canary_raises == len(ratios) - 1
    assert ask(llm, 999, fuse).reuse.fuse.ratio == ratios[-1]


def test_numbers_of_tokens_rise_as_well(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint("llama"), canary_share=1.0, canary_bound=1.0)
    told = [ask(llm, number, Fuse("first", tokens=1)).reuse for number in range(WINDOW + 1)]
    assert [told[0].fuse.tokens, told[-1].fuse.tokens] == [1, 2]
    assert told[-1].document_tokens_recomputed == 2 * told[0].document_tokens_recomputed


@pytest.mark.parametrize(("share", "checked"), [(0.0, 0), (0.25, 1), (0.5, 3), (1.0, 6)])
def test_as_many_answers_are_checked_as_asked_for(
    checkpoint: Folder, share: float, checked: int
) -> None:
    llm = make_llm(checkpoint("llama"), canary_share=share)
    for number in range(6):
        ask(llm, number, Fuse("first", tokens=2), GREEDY)
        ask(llm, number, None, GREEDY)
    assert llm.engine.counters.canaries == checked


def test_no_canary_is_added_while_somebody_waits(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint("llama"), canary_share=1.0, max_num_seqs=1)
    engine, running, waiting = llm.engine, [], []
    add = engine._canary.add

    def heard(request: Any) -> Any:
        running.append(request.request_id)
        waiting.append(len(engine._scheduler.waiting))
        return add(request)

    engine._canary.add = heard
    prompts = [[words(1, 9), document(n), document(n + 1), "?"] for n in range(4)]
    llm.generate(prompts, GREEDY, fuse=Fuse("first", tokens=2))
    while engine.has_work:
        engine.step()
    assert len(running) == 4 and set(waiting) == {0}
    assert engine.counters.canaries == 4


@pytest.mark.parametrize("agrees", [True, False])
def test_an_answer_that_its_reader_ended_late_is_compared_up_to_the_stop_string(
    checkpoint: Folder, agrees: bool
) -> None:
    llm = make_llm(checkpoint("llama"), canary_share=1.0)
    engine, prompt = llm.engine, [words(1, 9), document(7), document(8), words(3, 6)]
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=2)
    (output,) = llm.generate([prompt], params)
    stopping = replace(params, stop=[output.text[4]])
    (stopped,) = llm.generate([prompt], stopping)
    assert stopped.outputs[0].finish_reason == "stop"
    length = len(stopped.token_ids)
    parts = engine.prompts.from_parts(prompt)
    # an API process reads the answer of this request
    progress = engine.add(Request("one", parts, stopping, fuse=Fuse("all"), decodes=False))
    while len(progress.outputs[0].token_ids) < length + 3:
        engine.step()
    engine.end_output("one", 0)
    (case,) = engine._canary._pending
    assert len(case.answer) >= length + 3
    if not agrees:
        wrong = case.answer[0] + 1, *case.answer[1:]
        engine._canary._pending[0] = replace(case, answer=wrong)
    while engine.has_work:
        engine.step()
    assert (engine.counters.canaries, engine.counters.canaries_agreed) == (1, agrees)


@pytest.mark.parametrize("option", ["canary_share", "canary_bound"])
def test_a_share_is_a_share(option: str) -> None:
    with pytest.raises(InvalidOption, match=f"{option} must be from 0 to 1"):
        make_config({option: 1.5})
