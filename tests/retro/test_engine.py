"""The engine against the plainest form: the same pages, the same states, the same logits."""

from collections.abc import Sequence
from itertools import count
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from looseleaf import LLM, Document, SamplingParams, Select
from looseleaf.config import Local, Revise
from looseleaf.errors import InvalidOption
from looseleaf.prompt.request import Prompt, PromptParts, Request
from looseleaf.retro.revision import revision_of
from looseleaf.rope import softmax_scale
from looseleaf.tiers import LoadFailed
from tests.engine.harness import Folder, assert_idle, make_llm, words, worst
from tests.retro.dense import Choose, DenseRetro, Page

PAGE_SIZE = 16
TOLERANCE = 1e-4


def quest(tokens: int, sink: int = 4, recent: int = 16) -> Choose:
    """Quest's rule over sealed pages with the budget of `Select`, group by the largest."""

    def choose(retro: DenseRetro, layer: int, q: Tensor, sealed: int) -> list[set[int]]:
        pages, heads = retro.pages, retro.config.num_kv_heads
        others = len(pages) - sealed
        limit = max(1, -(-tokens // PAGE_SIZE) - others)
        first, last = -(-sink // PAGE_SIZE), max(0, -(-recent // PAGE_SIZE) - others)
        forced = {n for n in range(sealed) if n < first or n >= sealed - last}
        chosen = []
        for head in range(heads):
            scores = torch.stack([bound(retro, layer, q, page, head) for page in pages[:sealed]])
            scores[sorted(forced)] = torch.inf
            best = scores.sort(descending=True, stable=True).indices[:limit]
            chosen.append(set(best.tolist()))
        return chosen

    return choose


def bound(retro: DenseRetro, layer: int, q: Tensor, page: Page, head: int) -> Tensor:
    """The most that a key of the page could score for a query head of the KV head."""
    at = torch.arange(page.start, page.stop)
    keys = retro.turn(layer, retro.keys[layer][0, head, at], at - page.offset)
    queries = q.unflatten(0, (retro.config.num_kv_heads, -1))[head]
    here = torch.full((len(queries),), retro.rows[0] - page.offset)
    turned = retro.turn(layer, queries, here)
    most = torch.maximum(turned[:, None] * keys.amax(0), turned[:, None] * keys.amin(0)).sum(-1)
    return most.max() * softmax_scale(retro.config, layer)


def expected(llm: LLM, prompt: Prompt, output: Sequence[int], **how: Any) -> Tensor:
    """The logits of every output token by the plainest form."""
    parts: PromptParts = llm.engine.prompts.from_parts(prompt)
    decoder = llm.engine.runner.model
    settled: list[Page] = []
    start = 0
    for part in parts[:-1]:
        stop = start + len(part.tokens)
        settled += [Page(p, min(p + PAGE_SIZE, stop), start) for p in range(start, stop, PAGE_SIZE)]
        start = stop
    tokens = [token for part in parts for token in part.tokens]
    retro = DenseRetro(decoder.config, PAGE_SIZE, settled, start, **how)
    logits = [retro.prefill(decoder, tokens)]
    for n in range(1, len(output)):
        logits.append(retro.step(decoder, [*tokens, *output[:n]]))
    return torch.stack(logits)


def answer(llm: LLM, prompt: Prompt, length: int, **policies: Any) -> tuple[list[int], Tensor]:
    params = SamplingParams(max_tokens=length, seed=3, ignore_eos=True)
    (output,) = llm.generate([prompt], params, **policies)
    assert_idle(llm)
    recorder: Any = llm.engine.runner
    return list(output.token_ids), torch.stack(recorder.logits[output.request_id, 0])


PROMPT = [words(1, 40), Document(words(2, 41), context="prompt"), words(3, 30)]
SELECT = Select("quest", tokens=80, dense_layers=(0,))


@pytest.mark.parametrize(
    ("revise", "kernels"),
    [
        (Revise(1), "native"),
        (Revise(2), "native"),
        (Revise(4), "torch"),
        (Revise(9), "native"),
        (Revise(2, local="stale"), "torch"),
        (Revise(9, local="stale"), "native"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "smollm3"])
def test_the_engine_revises_like_the_plainest_form(
    checkpoint: Folder, family: str, revise: Revise, kernels: str
) -> None:
    llm = make_llm(checkpoint(family), cpu_kernels=kernels)
    tokens, logits = answer(llm, PROMPT, 28, select=SELECT, revise=revise)
    how: dict[str, Any] = {"window": revise.window, "local": revise.local, "dense_layers": (0,)}
    mine = expected(llm, PROMPT, tokens, choose=quest(80), **how)
    assert worst(logits, mine) <= TOLERANCE


def test_stale_states_are_felt(checkpoint: Folder) -> None:
    """Else the method to the letter would be what is exact."""
    exact, stale = (
        answer(make_llm(checkpoint()), PROMPT, 28, select=SELECT, revise=Revise(4, local=local))[1]
        for local in get_args(Local)
    )
    assert worst(exact, stale) > 10 * TOLERANCE


def test_revision_changes_what_a_small_budget_answers(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint())
    small = Select("quest", tokens=48, dense_layers=())
    base, revised = (
        answer(llm, PROMPT, 30, select=small, **more) for more in ({}, {"revise": Revise(4)})
    )
    assert (base[1][:8] - revised[1][:8]).abs().max() > 100 * TOLERANCE


MIXED: list[dict[str, Any]] = [
    {"select": SELECT, "revise": Revise(4)},
    {"select": SELECT},
    {},
    {"select": SELECT, "revise": Revise(2)},
    {"select": SELECT, "revise": Revise(4, local="stale")},
    {"select": Select("window", tokens=64)},
    {"select": SELECT, "revise": Revise(4)},
]


def test_a_batch_of_mixed_policies_equals_one_at_a_time(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), num_pages=200)
    prompts = [[words(n, 60 + 9 * n), Document(words(50, 41)), words(n, 20)] for n in range(7)]
    together = ask_together(llm, prompts, MIXED)
    alone = [ask_together(llm, [p], [how])[0] for p, how in zip(prompts, MIXED, strict=True)]
    for mine, other in zip(together, alone, strict=True):
        assert mine[0] == other[0] and worst(mine[1], other[1]) <= TOLERANCE


def ask_together(
    llm: LLM, prompts: Sequence[Prompt], policies: Sequence[dict[str, Any]], length: int = 24
) -> list[tuple[list[int], Tensor]]:
    """One batch in which every request has its own policies."""
    engine: Any = llm.engine
    params = SamplingParams(max_tokens=length, seed=5, ignore_eos=True)
    added = []
    for number, (prompt, how) in enumerate(zip(prompts, policies, strict=True)):
        parts = engine.prompts.from_parts(prompt)
        added.append(engine.add(Request(f"{id(prompts)}-{number}", parts, params, **how)))
    while engine.has_work:
        engine.step()
        engine.check()
    assert_idle(llm)
    logits = engine.runner.logits
    return [
        (list(p.output().token_ids), torch.stack(logits.pop((p.request.request_id, 0))))
        for p in added
    ]


@pytest.mark.parametrize("local", get_args(Local))
def test_a_step_computed_in_vain_changes_nothing(checkpoint: Folder, local: Local) -> None:
    """A layer's keys may fail to arrive half way through a step, which is then made again."""
    policies = [{"select": SELECT, "revise": Revise(4, local=local)}] * 2
    prompts = [[words(n, 90)] for n in range(2)]
    calm = ask_together(make_llm(checkpoint()), prompts, policies, 30)
    llm = make_llm(checkpoint())
    engine: Any = llm.engine
    forward, steps = engine.runner.model.forward, count()

    def failing(tokens: Tensor, attend: Any, *others: Any, **options: Any) -> Tensor:
        broken = next(steps) % 3 == 1

        def half_way(layer: int, *qkv: Tensor) -> Tensor:
            if broken and layer == 2:
                raise LoadFailed("lost")
            return attend(layer, *qkv)

        return forward(tokens, half_way, *others, **options)

    engine.runner.model.forward = failing
    shaken = ask_together(llm, prompts, policies, 30)
    assert next(steps) > 40
    for mine, other in zip(calm, shaken, strict=True):
        assert mine[0] == other[0] and worst(mine[1], other[1]) <= TOLERANCE


def test_what_outputs_kept_is_given_back(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), num_pages=200)
    engine: Any = llm.engine
    prompts = [[words(n, 100)] for n in range(5)]
    ask_together(llm, prompts, [{"select": SELECT, "revise": Revise(3)}] * 5, 8)
    states = engine._input_processor.features.revisions.states(3)
    assert len(states._free) == states.registers.shape[1] > 0


def test_a_page_is_not_published_that_came_of_a_choice(checkpoint: Folder) -> None:
    """The next request with the same beginning computes it by itself."""
    llm = make_llm(checkpoint())
    tokens, _ = answer(llm, PROMPT, 40, select=SELECT, revise=Revise(4))
    prompt = [*PROMPT[:2], [*llm.engine.prompts.from_parts(PROMPT)[-1].tokens, *tokens]]
    mine, fresh = (answer(engine, prompt, 4)[1] for engine in (llm, make_llm(checkpoint())))
    assert worst(mine, fresh) <= TOLERANCE


@pytest.mark.parametrize("local", get_args(Local))
def test_what_the_newest_row_holds_is_measured(checkpoint: Folder, local: Local) -> None:
    """Its choice alone counts, so the first steps of a window hold what they do without one."""
    small = Select("quest", tokens=64, dense_layers=(), recall_every=1)
    params = SamplingParams(max_tokens=3, seed=3, ignore_eos=True)
    reports = []
    for more in ({}, {"revise": Revise(4, local=local)}):
        (output,) = make_llm(checkpoint()).generate([PROMPT], params, select=small, **more)
        assert output.select is not None and output.select.recall_rows == 2
        reports.append(output.select.recall)
    # the first token that is decoded has no rows behind it, the second reads one that has changed
    assert reports[0] is not None and 0 < reports[0] < 1
    assert reports[1] == pytest.approx(reports[0], abs=0.05)


def test_exposure_is_one_at_its_own_step_and_grows(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint())
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)
    small = Select("quest", tokens=64, dense_layers=())
    (output,) = llm.generate([PROMPT], params, select=small, revise=Revise(2))
    assert output.revision is not None and output.revision.pages_read[0] > 0
    ratios = output.revision.exposure
    assert ratios[0] == 1.0 and ratios[7] > 1.0
    assert ratios == sorted(ratios)


def test_an_adaptive_window_falls_as_the_batch_grows(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), num_pages=400)
    engine: Any = llm.engine
    widths: dict[int, set[int]] = {}
    run = engine.runner.run

    def watched(work: Any, previous: Any = None) -> Any:
        logits = run(work, previous)
        if work.decode and not work.chunks:
            revisions = [revision for s in work.decode if (revision := revision_of(s))]
            rows = {max(1, revision.window.num_rows) for revision in revisions}
            widths.setdefault(len(work.decode), set()).update(rows)
        return logits

    engine.runner.run = watched
    wide = {"select": SELECT, "revise": Revise(4, adaptive=True)}
    for number in (1, 30):
        prompts = [[words(n, 100)] for n in range(number)]
        ask_together(llm, prompts, [wide] * number, 6)
    assert max(widths[1]) == 4 and widths[30] == {1}


def test_a_window_that_fell_to_one_row_grows_again_as_outputs_end(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), num_pages=400)
    prompts: list[Prompt] = [[words(n, 100)] for n in range(30)]
    engine: Any = llm.engine
    params = [
        SamplingParams(max_tokens=40 if n == 0 else 6, seed=5, ignore_eos=True) for n in range(30)
    ]
    wide = {"select": SELECT, "revise": Revise(4, adaptive=True)}
    added = [
        engine.add(Request(f"{n}", engine.prompts.from_parts(prompts[n]), params[n], **wide))
        for n in range(30)
    ]
    window, rows = added[0].outputs[0].sequence, []
    while engine.has_work:
        engine.step()
        engine.check()
        revision = revision_of(window)
        rows.append(revision.window.num_rows if revision else 0)
    assert min(rows) <= 0 and max(rows) == 4


@pytest.mark.parametrize("select", [None, Select("all")])
def test_revision_of_what_reads_everything_is_refused(
    checkpoint: Folder, select: Select | None
) -> None:
    llm = make_llm(checkpoint())
    with pytest.raises(InvalidOption, match="give select with a policy"):
        llm.generate(["a"], select=select, revise=Revise(2))


def test_an_adaptive_window_is_refused_where_batches_must_not_matter(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(), batch_invariant=True)
    with pytest.raises(InvalidOption, match="batch_invariant"):
        llm.generate(["a"], select=SELECT, revise=Revise(2, adaptive=True))


def test_in_dense_layers_the_rows_of_a_window_read_sealed_pages_together(
    checkpoint: Folder,
) -> None:
    llm = make_llm(checkpoint(), prefix_caching=False)
    engine: Any = llm.engine
    run, results = engine.runner.run, []

    def watched(work: Any, previous: Any = None) -> Any:
        results.append(run(work, previous))
        return results[-1]

    engine.runner.run = watched
    answer(llm, [words(3, 120)], 12, select=SELECT, revise=Revise(4))
    entries = [len(item.entries) for item in results[-1].groups.items]
    assert max(entries) == 4
