"""Every law of choosing and revising, for every policy: a column a law, a row a policy.

A new policy joins by one line of `TABLE`. That more budget holds more of the attention is tried
beside, in `tests/sparse`, where it can be measured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from looseleaf import Document, Select
from looseleaf.attention.select.policy import Candidates, Choice
from looseleaf.config import EVICTING, Fuse, Local, Revise
from looseleaf.ops.rotate import rotate
from looseleaf.prompt.request import Prompt, Request
from looseleaf.retro import RevisionStates
from looseleaf.retro.revision import revision_of
from looseleaf.sparse import SparsePolicy
from tests.checkpoints import make_checkpoint
from tests.engine.harness import Folder, drawn, make_llm, words, worst
from tests.retro.test_engine import answer, ask_together

TABLE = {
    "window": Select("window", tokens=64, dense_layers=()),
    "quest": Select("quest", tokens=64, dense_layers=(0,)),
    "quest, sums of a group": Select("quest", tokens=64, dense_layers=(0,), group="sum"),
    "quest, top-p": Select("quest", tokens=96, mass=0.5, dense_layers=(0,)),
    "quest, pyramid": Select("quest", tokens=64, dense_layers=(0,), layer_budgets="pyramid"),
    "representatives": Select("representatives", tokens=64, dense_layers=(0,)),
    "representatives, top-p": Select("representatives", tokens=96, mass=0.3, dense_layers=(0,)),
    "partial": Select("partial", tokens=64, dense_layers=(0,)),
}
each_row = pytest.mark.parametrize("row", TABLE)
# pages that are chosen by their place are no others for an earlier row
REVISED = [row for row in TABLE if row != "window"]
each_revised_row = pytest.mark.parametrize("row", REVISED)
TOLERANCE = 1e-4
LENGTH, WINDOW = 34, 3
PROMPT: Prompt = [words(1, 50), Document(words(2, 41), context="prompt"), words(3, 40)]


@each_row
def test_the_budgets_of_the_table_are_felt(checkpoint: Folder, row: str) -> None:
    """Else none of the laws would say anything."""
    _, dense = answer(make_llm(checkpoint()), PROMPT, 8)
    _, chosen = answer(make_llm(checkpoint()), PROMPT, 8, select=TABLE[row])
    assert worst(dense, chosen) > 10 * TOLERANCE
    if row in REVISED:
        _, revised = answer(make_llm(checkpoint()), PROMPT, 8, select=TABLE[row], revise=Revise(3))
        assert worst(chosen, revised) > TOLERANCE


def everything(policy: SparsePolicy, layer: int, q: Tensor, candidates: Candidates) -> Choice:
    """Every candidate of every row, whatever the budget says."""
    rows, most = candidates.table.pages.shape
    heads = candidates.num_kv_heads
    counts = candidates.table.num_pages[:, None].expand(rows, heads)
    return Choice(torch.arange(most).expand(rows, heads, most).contiguous(), counts)


@pytest.mark.parametrize(
    ("row", "revise"),
    [
        *((row, Revise(3)) for row in REVISED),
        *(("quest", revise) for revise in (Revise(1), Revise(9), Revise(3, local="stale"))),
    ],
    ids=str,
)
def test_a_full_budget_equals_dense_decode(
    checkpoint: Folder, row: str, revise: Revise, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = answer(make_llm(checkpoint()), PROMPT, LENGTH)
    # a budget that holds all would not be asked
    monkeypatch.setattr(SparsePolicy, "choose", everything)
    how = {"select": TABLE[row], "revise": revise}
    chosen = answer(make_llm(checkpoint()), PROMPT, LENGTH, **how)
    assert dense[0] == chosen[0] and worst(dense[1], chosen[1]) <= TOLERANCE


@pytest.mark.parametrize("local", get_args(Local))
def test_what_was_computed_again_is_read_once(
    checkpoint: Folder, local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full budget a blended request is answered as if nothing were chosen or revised."""
    fuse, documents = Fuse("first", tokens=12), [words(1, 50), Document(words(2, 41)), words(3, 40)]
    dense = answer(make_llm(checkpoint()), documents, LENGTH, fuse=fuse)
    monkeypatch.setattr(SparsePolicy, "choose", everything)
    how = {"select": TABLE["quest"], "revise": Revise(WINDOW, local=local), "fuse": fuse}
    chosen = answer(make_llm(checkpoint()), documents, LENGTH, **how)
    assert dense[0] == chosen[0] and worst(dense[1], chosen[1]) <= TOLERANCE


@each_row
def test_a_window_of_one_is_the_base_policy_to_the_bit(checkpoint: Folder, row: str) -> None:
    base, revised = (
        answer(make_llm(checkpoint()), PROMPT, LENGTH, select=TABLE[row], **more)
        for more in ({}, {"revise": Revise(1)})
    )
    assert base[0] == revised[0] and torch.equal(base[1], revised[1])


@contextmanager
def queries_of(llm: Any) -> Iterator[dict[int, Tensor]]:
    """The query of every row that decodes, by its position, in a model of one layer."""
    queries: dict[int, Tensor] = {}
    attention = llm.engine.runner.attention
    step = attention.step

    def watching(rows: Any) -> Callable[..., Tensor]:
        attend = step(rows)

        def and_keep(layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            for n, row in enumerate(rows.decode):
                queries[row.position] = q[n].clone()
            result: Tensor = attend(layer, q, k, v)
            return result

        and_keep.reads = attend.reads  # type: ignore[attr-defined]
        return and_keep

    attention.step = watching
    yield queries
    attention.step = step


@each_revised_row
def test_in_one_layer_a_revised_output_is_attention_over_the_union_of_pages_read(
    tmp_path: Any, row: str
) -> None:
    """What is kept of each row, after each step, beside attention over all that it has read."""
    llm: Any = make_llm(make_checkpoint(tmp_path, num_hidden_layers=1))
    engine, attention = llm.engine, llm.engine.runner.attention
    parts = engine.prompts.from_parts([words(1, 130)])
    how = {"select": replace(TABLE[row], dense_layers=()), "revise": Revise(WINDOW)}
    progress = engine.add(Request("one", parts, drawn(0, max_tokens=LENGTH), **how))
    sequence, looked_at = progress.outputs[0].sequence, 0
    with queries_of(llm) as queries:
        while engine.has_work:
            engine.step()
            revision = revision_of(sequence)
            if revision is None or revision._slot is None or revision.window.num_past < 0:
                continue
            states: RevisionStates = revision.policy.kept
            newest, rows = revision.window.position, revision.window.num_rows
            for age in range(rows):
                place = (newest - age) % states.window
                seen = states.registers[0, revision._slot].int() & ((2 << age) - 1)
                kept = states.out[0, revision._slot, place], states.lse[0, revision._slot, place]
                at, rotation = torch.tensor([newest - age]), attention.rotations[0]
                q = rotate(queries[newest - age][None], at, rotation)
                out, lse = over_pages(q[0], seen, list(sequence.tail.pages), attention)
                torch.testing.assert_close(kept[1], lse, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(kept[0], out, rtol=1e-4, atol=1e-4)
                looked_at += int(age > 0)
    assert looked_at > LENGTH


def over_pages(q: Tensor, seen: Tensor, pages: list[int], attention: Any) -> tuple[Tensor, Tensor]:
    """Attention of a turned query over the pages whose register, ``seen`` ``[kv_heads, pages]``, is
    not 0."""
    k_pages, v_pages = attention.pool.layer(0)
    scale = attention.rules[0].softmax_scale
    outs, lses = [], []
    for head, queries in enumerate(q.unflatten(0, (k_pages.shape[1], -1))):
        some = [pages[n] for n in seen[head].nonzero()[:, 0].tolist()]
        keys, values = (x[some, head].flatten(0, 1) for x in (k_pages, v_pages))
        scores = queries @ keys.T * scale
        lses.append(scores.logsumexp(-1))
        outs.append(scores.softmax(-1) @ values)
    return torch.cat(outs), torch.cat(lses)


@each_revised_row
def test_values_of_one_give_outputs_of_one(checkpoint: Folder, row: str) -> None:
    """Whatever is read, kept and merged, its weights sum to one."""
    llm: Any = make_llm(checkpoint())
    attention, seen = llm.engine.runner.attention, []
    step = attention.step

    def watching(rows: Any) -> Callable[..., Tensor]:
        attend = step(rows)

        def with_ones(layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            result: Tensor = attend(layer, q, k, torch.ones_like(v))
            seen.append((len(rows.decode), (result - 1).abs().max().item()))
            return result

        with_ones.reads = attend.reads  # type: ignore[attr-defined]
        return with_ones

    attention.step = watching
    answer(llm, PROMPT, LENGTH, select=TABLE[row], revise=Revise(WINDOW))
    assert max(error for _, error in seen) < 1e-5
    assert sum(rows == WINDOW for rows, _ in seen) > LENGTH


@each_revised_row
def test_seen_sets_only_grow_and_sealed_pages_never_change(checkpoint: Folder, row: str) -> None:
    """A register of the next step is that of this one, a bit further; and what is final stays."""
    llm: Any = make_llm(checkpoint())
    engine, pool = llm.engine, llm.engine.store.pool
    parts = engine.prompts.from_parts(PROMPT)
    how = {"select": TABLE[row], "revise": Revise(WINDOW)}
    progress = engine.add(Request("one", parts, drawn(0, max_tokens=50), **how))
    sequence = progress.outputs[0].sequence
    pages: dict[int, Tensor] = {}
    before, steps, sealed = torch.zeros(0), 0, 0
    while engine.has_work:
        engine.step()
        revision = revision_of(sequence)
        if revision is None or revision._slot is None or revision.window.num_past < 0:
            continue
        now = revision.policy.kept.registers[1:, revision._slot].clone().int()
        if len(before):
            kept = before[..., : now.shape[-1]] & 127
            assert torch.equal(now[..., : kept.shape[-1]] >> 1, kept)
            steps += 1
        before, sealed = now, revision.window.sealed
        for page in sequence.tail.pages[:sealed]:
            held = pool.kv[:, :, page].clone()
            assert torch.equal(pages.setdefault(page, held), held)
    assert steps > 40 and len(pages) > 3


@each_revised_row
def test_preemption_in_the_middle_of_a_window_changes_nothing(checkpoint: Folder, row: str) -> None:
    prompts: list[Prompt] = [[words(n, 90)] for n in range(3)]
    policies = [{"select": TABLE[row], "revise": Revise(WINDOW)}] * 3
    roomy = ask_together(make_llm(checkpoint(), num_pages=96), prompts, policies, LENGTH)
    tight: Any = make_llm(checkpoint(), num_pages=20)
    narrow = ask_together(tight, prompts, policies, LENGTH)
    assert tight.engine.counters.preemptions > 0
    for (tokens, logits), (others, again) in zip(roomy, narrow, strict=True):
        assert tokens == others
        # the last token's logits are of a window that was lived through again
        assert worst(logits[-1:], again[-1:]) <= TOLERANCE


def test_a_batch_of_mixed_policies_equals_one_at_a_time(checkpoint: Folder) -> None:
    """All of the table at once, with windows and without, beside what throws keys away."""
    how: list[dict[str, Any]] = [{}]
    for n, (row, select) in enumerate(TABLE.items()):
        how.append({"select": select})
        if row in REVISED:
            how.append({"select": select, "revise": Revise(2 + n % 3)})
    prompts: list[Prompt] = [
        [words(n, 60 + 7 * n), Document(words(50, 41)), words(n, 20)] for n in range(len(how))
    ]
    # their text is their own
    how += [{"select": Select(policy, tokens=48)} for policy in EVICTING]
    prompts += [[words(90 + n, 110)] for n in range(len(EVICTING))]
    llm = make_llm(checkpoint(), num_pages=600)
    together = ask_together(llm, prompts, how, 20)
    alone = [ask_together(llm, [p], [one], 20)[0] for p, one in zip(prompts, how, strict=True)]
    for mine, other in zip(together, alone, strict=True):
        assert mine[0] == other[0] and worst(mine[1], other[1]) <= TOLERANCE
