"""Selection in the engine: what a request chooses to read is its own affair, whatever happens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from looseleaf import LLM, Select
from looseleaf.config import Fuse
from looseleaf.errors import InvalidOption
from looseleaf.prompt.request import Prompt, Request
from looseleaf.sparse import BreakEven, make_policy
from tests.engine.harness import (
    TOLERANCE,
    Folder,
    ask,
    assert_idle,
    assert_same_answers,
    document,
    drawn,
    make_llm,
    words,
    worst,
)

A, B = document(1, 70), document(2, 50)
LEAD = words(1, 40)
PROMPTS: list[Prompt] = [
    [LEAD, A, B, words(10, 30)],
    [LEAD, B, words(11, 90)],
    [words(12, 200)],
    [LEAD, B, A, words(13, 50)],
]
POLICIES = ["window", "quest", "representatives", "partial"]


def select(policy: str, tokens: int = 64, **options: Any) -> Select:
    return Select(policy, tokens, **{"dense_layers": (0,), **options})  # type: ignore[arg-type]


def answers(
    llm: LLM, selects: Sequence[Select | None], max_tokens: int = 8, **options: Any
) -> list[tuple[int, ...]]:
    """What the prompts are answered, each under its policy, all in one batch."""
    engine, added = llm.engine, []
    for number, (prompt, policy) in enumerate(zip(PROMPTS, selects, strict=False)):
        parts = engine.prompts.from_parts(prompt)
        name = f"{id(selects)}-{number}"
        params = drawn(number, max_tokens=max_tokens)
        added.append(engine.add(Request(name, parts, params, select=policy, **options)))
    while engine.has_work:
        engine.step()
        engine.check()
    assert_idle(llm)
    assert not [progress.error for progress in added if progress.error]
    return [progress.output().token_ids for progress in added]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_small_budget_is_felt(checkpoint: Folder, policy: str) -> None:
    llm = make_llm(checkpoint())
    dense = answers(llm, [None] * 4)
    assert answers(llm, [select(policy, 32)] * 4) != dense


def test_a_batch_of_policies_equals_one_at_a_time(checkpoint: Folder) -> None:
    mixed = [select("quest"), None, select("window"), select("quest", 96, group="sum")]
    together = answers(make_llm(checkpoint()), mixed)
    for number, policy in enumerate(mixed):
        llm = make_llm(checkpoint())
        alone = llm.generate([PROMPTS[number]], drawn(number, max_tokens=8), select=policy)
        assert alone[0].token_ids == together[number]


@pytest.mark.parametrize("policy", ["window", "quest"])
def test_preemption_and_resumption_change_nothing(checkpoint: Folder, policy: str) -> None:
    selects = [select(policy)] * 4
    roomy, tight = make_llm(checkpoint()), make_llm(checkpoint(), num_pages=43)
    expected = answers(roomy, selects, 36)
    assert roomy.engine.counters.preemptions == 0
    assert answers(tight, selects, 36) == expected
    assert tight.engine.counters.preemptions > 0
    # tokens forgive much: what an output goes on from must be the same as well
    last = [
        [logits[-1] for _, logits in sorted(llm.engine.runner.logits.items())]  # type: ignore[attr-defined]
        for llm in (roomy, tight)
    ]
    for mine, other in zip(*last, strict=True):
        assert worst(mine, other) <= TOLERANCE


def test_what_came_of_a_choice_is_no_prefix_of_others(checkpoint: Folder) -> None:
    """A dense request that goes on from the answer of a selecting one computes it itself."""
    llm, fresh = make_llm(checkpoint()), make_llm(checkpoint())
    [first] = llm.generate([PROMPTS[2]], drawn(0, max_tokens=30), select=select("window", 32))
    longer = [*first.prompt_token_ids, *first.token_ids, 5]
    mine, other = ask(llm, [[longer]]), ask(fresh, [[longer]])
    assert_same_answers(mine, other)
    assert mine[0].output.reuse.text_tokens_cached > 0


@pytest.mark.parametrize("options", [{"dense_below": 4000}, {"tokens": 4000}])
def test_below_its_threshold_a_policy_has_the_bits_of_dense_decode(
    checkpoint: Folder, options: dict[str, int]
) -> None:
    policy = Select("quest", **{"tokens": 64, "dense_layers": (), **options})  # type: ignore[arg-type]
    dense, chosen = make_llm(checkpoint()), make_llm(checkpoint())
    params = drawn(3, max_tokens=6)
    plain = ask(dense, PROMPTS, params)
    outputs = chosen.generate(PROMPTS, params, select=policy)
    recorder: Any = chosen.engine.runner
    for one, output in zip(plain, outputs, strict=True):
        assert torch.equal(one.logits, torch.stack(recorder.logits[output.request_id, 0]))


def test_what_is_left_to_the_engine_is_read_whole_while_that_is_faster(
    checkpoint: Folder,
) -> None:
    """As if the length had been given, whatever else is in the batch."""
    policy = Select("quest", tokens=32, dense_layers=())
    dense = answers(make_llm(checkpoint()), [None] * 4)
    made = {}
    for per_key in (0.09, 1e-6):
        even = BreakEven(per_key, 16)
        [settled] = {even.tokens(policy, rule) for rule in [make_policy(policy, 16)] if rule}
        llm, other, alone = (make_llm(checkpoint()) for _ in range(3))
        for one in (llm, alone):
            one.engine._input_processor = replace(one.engine._input_processor, break_even=even)
        made[per_key] = answers(llm, [policy] * 4)
        assert made[per_key] == answers(other, [replace(policy, dense_below=settled)] * 4)
        assert made[per_key][0] == answers(alone, [policy])[0]
    # two of the four prompts are longer than the first length, and none than the second
    short = [mine == other for mine, other in zip(made[0.09], dense, strict=True)]
    assert any(short) and not all(short)
    assert made[1e-6] == dense


def test_blended_requests_choose_around_their_patch(checkpoint: Folder) -> None:
    """With room for everything a blended request is answered as if it chose nothing."""
    llm = make_llm(checkpoint())
    fuse = Fuse("first", tokens=12)
    dense = answers(llm, [None] * 4, fuse=fuse)
    # one page short of everything at most, and that one is hidden by what is forced
    assert answers(llm, [select("quest", mass=1.0, tokens=4000)] * 4, fuse=fuse) == dense
    assert answers(llm, [select("quest", 32)] * 4, fuse=fuse) != dense


def test_sealed_pages_never_change(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint())
    engine, pool = llm.engine, llm.engine.store.pool
    parts = engine.prompts.from_parts(PROMPTS[0])
    progress = engine.add(
        Request("one", parts, drawn(0, max_tokens=50), select=select("quest", 48))
    )
    sequence = progress.outputs[0].sequence
    seen: dict[int, torch.Tensor] = {}
    while engine.has_work:
        engine.step()
        full = sequence.tail.computed // pool.page_size
        for page in sequence.tail.pages[:full]:
            now = pool.kv[:, :, page].clone()
            assert torch.equal(seen.setdefault(page, now), now)
    assert len(seen) > 3


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Select("quest", dense_layers=(0, 1, 2)), "all 3 layers"),
        (Select("window", dense_layers=(7,)), "go past"),
        (Select("quest", layer_budgets=(1.0, 2.0), dense_layers=()), "2 weights, but the model 3"),
    ],
)
def test_a_policy_that_the_model_has_no_layers_for_is_refused(
    checkpoint: Folder, policy: Select, message: str
) -> None:
    with pytest.raises(InvalidOption, match=message):
        make_llm(checkpoint()).generate([PROMPTS[2]], select=policy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "all", "tokens": 5}, "reads everything"),
        ({"policy": "window", "mass": 0.5}, "does not estimate a mass"),
        ({"tokens": 5, "ratio": 0.5}, "one of"),
        ({"tokens": 0}, "positive"),
        ({"ratio": 1.5}, "ratio"),
        ({"mass": 0.0}, "mass"),
        ({"sink": -1}, "sink must be 0 or more, not -1"),
        ({"dense_layers": (2, 1)}, "ascending"),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        Select(**options)
