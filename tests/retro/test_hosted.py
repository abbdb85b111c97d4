"""The laws of revision where rows read hosted documents by their indexes, key by key.

`tests/index/test_hosted_window.py` has them for one layer, beside sets of Python; here are
whole models with random weights, in an engine on a CPU."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from looseleaf import Document, Select
from looseleaf.config import IndexConfig, Revise
from looseleaf.errors import InvalidOption, InvalidRequest
from looseleaf.index.host.attend import HostedRead
from looseleaf.ops.native import native_build
from looseleaf.ops.rotate import rotate
from looseleaf.prompt.request import Prompt, Request
from looseleaf.retro.revision import revision_of
from looseleaf.tiers import LoadFailed
from tests.checkpoints import make_checkpoint
from tests.engine.harness import Folder, drawn, make_llm, words, worst
from tests.retro.test_engine import answer, ask_together

LENGTH, WINDOW, TOLERANCE = 16, 3, 1e-4
INDEX = IndexConfig("flat", sink=4, local=12)
FEW = Select("retrieval", tokens=28)
DENSE_FIRST = Select("retrieval", tokens=28, dense_layers=(0,))
BOOK = Document(words(60, 120), context="alone")
OTHER = Document(words(61, 60), context="alone")


def prompt(seed: int, before: int = 20, *documents: Document) -> Prompt:
    return [words(seed, before), *(documents or (BOOK,)), words(seed + 1, 24)]


def hosting(folder: Any, *documents: Document, **options: Any) -> Any:
    """An engine that hosts ``documents``, or one."""
    llm: Any = make_llm(folder, **options)
    for document in documents or (BOOK,):
        llm.host(document, index=INDEX)
    return llm


def len_of(llm: Any, document: Document = BOOK) -> int:
    """Tokens of a document."""
    (part,) = (p for p in llm.engine.prompts.from_parts(["a", document, "b"]) if hasattr(p, "name"))
    return len(part.tokens)


def test_budget_and_window_are_felt(checkpoint: Folder) -> None:
    """Else none of the laws would say anything."""
    llm = hosting(checkpoint())
    full = answer(llm, prompt(1), LENGTH, select=Select("retrieval", ratio=1.0))[1]
    base = answer(llm, prompt(1), LENGTH, select=FEW)[1]
    revised = answer(llm, prompt(1), LENGTH, select=FEW, revise=Revise(WINDOW))[1]
    assert worst(full, base) > 10 * TOLERANCE and worst(base, revised) > 10 * TOLERANCE


@pytest.mark.parametrize("select", [FEW, DENSE_FIRST])
def test_a_window_of_one_is_retrieval_to_the_bit(checkpoint: Folder, select: Select) -> None:
    base, revised = (
        answer(hosting(checkpoint()), prompt(1), LENGTH, select=select, **more)
        for more in ({}, {"revise": Revise(1)})
    )
    assert base[0] == revised[0] and torch.equal(base[1], revised[1])


@pytest.mark.parametrize(("window", "kernels"), [(2, "native"), (WINDOW, "torch"), (9, "native")])
def test_a_full_budget_equals_dense_decode(
    checkpoint: Folder, window: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = answer(make_llm(checkpoint(), cpu_kernels=kernels), prompt(1), LENGTH)
    # rows whose newest reads everything would not be revised
    monkeypatch.setattr(HostedRead, "leaves_out", property(lambda read: True))
    everything = {"select": Select("retrieval", ratio=1.0), "revise": Revise(window)}
    mine = answer(hosting(checkpoint(), cpu_kernels=kernels), prompt(1), LENGTH, **everything)
    assert dense[0] == mine[0] and worst(dense[1], mine[1]) <= TOLERANCE


def test_all_keys_but_some_in_turn_come_together(checkpoint: Folder) -> None:
    """A budget of nearly all keys and a wide window leave next to nothing unread."""
    dense = answer(make_llm(checkpoint()), prompt(1), LENGTH)[1]
    llm = hosting(checkpoint())
    most = Select("retrieval", tokens=len_of(llm) - 10)
    errors = [
        worst(dense, answer(llm, prompt(1), LENGTH, select=most, revise=Revise(w))[1])
        for w in (1, 9)
    ]
    assert errors[1] < errors[0]


def watched(llm: Any, see: Callable[[Any, int, Tensor, Tensor], None], ones: bool = False) -> None:
    """Have ``see`` told rows, layer, queries and outputs of every step; values may be ones."""
    attention = llm.engine.runner.attention
    step = attention.step

    def watching(rows: Any) -> Callable[..., Tensor]:
        attend = step(rows)

        def and_tell(layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            queries = q.clone()
            result: Tensor = attend(layer, q, k, torch.ones_like(v) if ones else v)
            see(rows, layer, queries, result)
            return result

        and_tell.reads = attend.reads  # type: ignore[attr-defined]
        return and_tell

    attention.step = watching


def test_in_one_layer_a_revised_output_is_attention_over_the_union_of_keys_read(
    tmp_path: Any,
) -> None:
    """Of every row of every step: the ends of the documents, what searches since its own found,
    and all that stands in the pool. Two documents, one of which is read whole."""
    llm = hosting(make_checkpoint(tmp_path, num_hidden_layers=1), BOOK, OTHER)
    attention, looked_at = llm.engine.runner.attention, 0
    found: dict[int, list[set[int]]] = {}
    rule, heads = attention.rules[0], attention.num_qo_heads
    length = len_of(llm)
    start = len(llm.engine.prompts.from_parts(prompt(1, 20, BOOK, OTHER))[0].tokens)

    def at(q: Tensor, place: int) -> Tensor:
        return rotate(q[None], torch.tensor([place]), attention.rotations[0])[0]

    def see(rows: Any, layer: int, q: Tensor, out: Tensor) -> None:
        nonlocal looked_at
        if not rows.decode:
            return
        newest = rows.decode[0].position
        (book, other) = rows.decode[0].hosted
        k, v = book.segment.kv[0]
        group = heads // len(k)
        turned = at(q[0], newest - start)
        assert book.offset == start and other.offset == start + length
        found[newest] = [
            {*range(4), *range(length - 12, length)}
            | {4 + int(n) for n in (k[h // group, 4 : length - 12] @ turned[h]).topk(12).indices}
            for h in range(heads)
        ]
        for n, row in enumerate(rows.decode):
            assert row.hosted == (book, other) and row.position == newest - n
            own = pooled(row, attention)
            for h in range(heads):
                ids = sorted(set().union(*(found[p][h] for p in range(row.position, newest + 1))))
                parts = [
                    (k[h // group, ids], v[h // group, ids], start),
                    (*other.segment.kv[0, :, h // group], start + length),
                    *((x[h // group], y[h // group], o) for x, y, o in own),
                ]
                scores = torch.cat([x @ at(q[n], row.position - o)[h] for x, _, o in parts])
                shares = (scores * rule.softmax_scale).softmax(0)
                expected = shares @ torch.cat([y for _, y, _ in parts])
                torch.testing.assert_close(out[n, h], expected, rtol=0, atol=1e-4)
            looked_at += n > 0

    watched(llm, see)
    how = {"select": Select("retrieval", tokens=28), "revise": Revise(WINDOW)}
    from looseleaf.prompt.placements import HostedUse

    plain = HostedUse.read

    def whole_other(use: Any, select: Select) -> HostedRead:
        read = plain(use, select)
        return read if use.num_tokens == length else HostedRead(read.segment, read.offset)

    HostedUse.read = whole_other  # type: ignore[method-assign]
    try:
        answer(llm, prompt(1, 20, BOOK, OTHER), LENGTH, **how)
    finally:
        HostedUse.read = plain  # type: ignore[method-assign]
    assert looked_at > LENGTH


def pooled(row: Any, attention: Any) -> list[tuple[Tensor, Tensor, int]]:
    """Keys and values of what a row reads in the pool, ``[kv_heads, keys, dim]``, and their Δ."""
    k_pages, v_pages = attention.pool.layer(0)
    found = []
    for span in (*row.settled, row.tail):
        pages = list(span.pages)[: -(-span.length // attention.pool.page_size)]
        k, v = (
            x[pages].transpose(0, 1).flatten(1, 2)[:, : span.length] for x in (k_pages, v_pages)
        )
        found.append((k, v, span.offset))
    return found


def test_values_of_one_give_outputs_of_one(checkpoint: Folder) -> None:
    llm: Any = make_llm(checkpoint())
    segment = llm.host(BOOK, index=INDEX)
    segment.kv[:, 1] = 1.0
    seen: list[tuple[int, float]] = []
    watched(
        llm, lambda rows, *x: seen.append((len(rows.decode), (x[2] - 1).abs().max().item())), True
    )
    answer(llm, prompt(1), LENGTH, select=DENSE_FIRST, revise=Revise(WINDOW))
    decoded = [error for rows, error in seen if rows == WINDOW]
    assert len(decoded) > LENGTH and max(decoded) < 1e-5


def test_preemption_in_the_middle_of_a_window_changes_nothing(checkpoint: Folder) -> None:
    """Nor where nothing is revised: what a row left out, the row that takes its place does too."""
    prompts = [prompt(10 * n, 60) for n in range(3)]
    how: list[dict[str, Any]] = [{"select": FEW, "revise": Revise(w)} for w in (1, WINDOW, 9)]
    roomy = ask_together(hosting(checkpoint()), prompts, how, 34)
    tight = hosting(checkpoint(), num_pages=19)
    narrow = ask_together(tight, prompts, how, 34)
    assert tight.engine.counters.preemptions > 0
    for (tokens, logits), (others, again) in zip(roomy, narrow, strict=True):
        assert tokens == others and worst(logits[-1:], again[-1:]) <= TOLERANCE


def test_a_batch_of_mixed_policies_equals_one_at_a_time(checkpoint: Folder) -> None:
    """Windows of several widths at several places, rows without, and pages that are chosen."""
    pages = Select("quest", tokens=48, dense_layers=())
    how: list[dict[str, Any]] = [
        {"select": FEW, "revise": Revise(4)},
        {"select": FEW},
        {"select": pages, "revise": Revise(2)},
        {"select": DENSE_FIRST, "revise": Revise(2)},
        {"select": replace(FEW, layer_budgets="pyramid"), "revise": Revise(9)},
        {},
    ]
    prompts = [prompt(10 * n, 10 + 4 * n, *((BOOK, OTHER)[: 1 + n % 2])) for n in range(6)]
    llm = hosting(checkpoint(), BOOK, OTHER, num_pages=200)
    together = ask_together(llm, prompts, how, LENGTH)
    alone = [ask_together(llm, [p], [one], LENGTH)[0] for p, one in zip(prompts, how, strict=True)]
    for mine, other in zip(together, alone, strict=True):
        assert mine[0] == other[0] and worst(mine[1], other[1]) <= TOLERANCE


def test_a_step_computed_in_vain_changes_nothing(checkpoint: Folder) -> None:
    """A layer's keys may fail to arrive half way through a step, which is then made again."""
    policies = [{"select": FEW, "revise": Revise(4)}] * 2
    prompts = [prompt(10 * n) for n in range(2)]
    calm = ask_together(hosting(checkpoint()), prompts, policies, LENGTH)
    llm = hosting(checkpoint())
    forward, steps = llm.engine.runner.model.forward, count()

    def failing(tokens: Tensor, attend: Any, *others: Any, **options: Any) -> Tensor:
        broken = next(steps) % 3 == 1

        def half_way(layer: int, *qkv: Tensor) -> Tensor:
            if broken and layer == 2:
                raise LoadFailed("lost")
            return attend(layer, *qkv)

        return forward(tokens, half_way, *others, **options)

    llm.engine.runner.model.forward = failing
    shaken = ask_together(llm, prompts, policies, LENGTH)
    assert next(steps) > LENGTH
    for mine, other in zip(calm, shaken, strict=True):
        assert mine[0] == other[0] and worst(mine[1], other[1]) <= TOLERANCE


def test_an_adaptive_window_falls_to_one_and_grows_again(checkpoint: Folder) -> None:
    """Rows that were let go do not come back with what they had kept."""
    llm = hosting(checkpoint(), num_pages=400)
    wide = {"select": FEW, "revise": Revise(4, adaptive=True)}
    parts = llm.engine.prompts.from_parts(prompt(1))
    lengths = [30, *[6] * 29]
    added = [
        llm.engine.add(Request(f"{n}", parts, drawn(n, max_tokens=most), **wide))
        for n, most in enumerate(lengths)
    ]
    sequence, rows = added[0].outputs[0].sequence, []
    while llm.engine.has_work:
        llm.engine.step()
        rows.append(revision_of(sequence).window.num_rows)
    assert min(rows) == 0 and max(rows) == 4
    assert added[0].output().revision.exposure[0] == 1.0


def test_exposure_counts_keys_and_grows_with_later_rows(checkpoint: Folder) -> None:
    llm = hosting(checkpoint())
    (output,) = llm.generate([prompt(1)], drawn(3, max_tokens=30), select=FEW, revise=Revise(4))
    assert output.revision is not None and not output.revision.pages_read
    model = llm.engine.runner.model.config
    rows = 29
    assert output.revision.keys_read[0] == rows * model.num_layers * model.num_qo_heads * 28
    ratios = output.revision.exposure
    assert len(ratios) == 4 and ratios[0] == 1.0 < ratios[1] < ratios[2] < ratios[3]
    hosted = llm.engine.runner.attention.hosted.counters
    assert hosted.keys_read == output.revision.keys_read[0] and hosted.share_read == 28 / len_of(
        llm
    )


def test_an_answer_that_left_keys_out_is_nobody_elses_prefix(checkpoint: Folder) -> None:
    llm = hosting(checkpoint())
    how = {"select": FEW, "revise": Revise(WINDOW)}
    tokens, _ = answer(llm, prompt(1), 34, **how)
    longer = [*prompt(1)[:2], [*llm.engine.prompts.from_parts(prompt(1))[-1].tokens, *tokens]]
    mine, fresh = (answer(engine, longer, 2, **how)[1] for engine in (llm, hosting(checkpoint())))
    assert worst(mine, fresh) <= TOLERANCE


def test_a_document_that_is_deleted_is_let_go(checkpoint: Folder) -> None:
    llm: Any = make_llm(checkpoint())
    segment = llm.host(BOOK, index=INDEX)
    answer(llm, prompt(1), 4, select=FEW, revise=Revise(2))
    windows = llm.engine.runner.attention._builder.windows
    assert any(work.holds(segment) for work in windows._works.values())
    assert llm.engine.hosting.forget(segment.key)
    assert not any(work.holds(segment) for work in windows._works.values())


def test_an_index_that_estimates_is_refused(checkpoint: Folder) -> None:
    llm: Any = make_llm(checkpoint())
    llm.host(BOOK, index=IndexConfig("ivf", sink=4, local=12, estimate=True))
    with pytest.raises(InvalidRequest, match="an index that estimates"):
        llm.generate([prompt(1)], select=FEW, revise=Revise(2))


def test_what_has_no_meaning_or_no_compiler_is_refused(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = hosting(checkpoint(), batch_invariant=True)
    with pytest.raises(InvalidOption, match="batch_invariant"):
        llm.generate([prompt(1)], select=FEW, revise=Revise(2, adaptive=True))
    with pytest.raises(InvalidRequest, match="leave local out"):
        llm.generate([prompt(1)], select=FEW, revise=Revise(2, local="stale"))
    with monkeypatch.context() as patch:
        patch.setenv("CC", "no-such-compiler")
        with pytest.raises(InvalidRequest, match="takes a C compiler"):
            llm.generate([prompt(1)], select=FEW, revise=Revise(2))
        assert native_build.os.environ["CC"] == "no-such-compiler"
