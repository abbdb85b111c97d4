"""What the controller chose and expected is in the report, and follows what it knows of times."""

from pathlib import Path
from typing import Literal

import pytest

from looseleaf import Fuse
from looseleaf.engine.tiering.compute_time import ComputeTime
from tests.engine.harness import Folder, assert_same_answers, make_llm
from tests.engine.harness import ask as ask_with
from tests.engine.tiered import PARAMS, forget_pool, load_always, prompts, tiered
from tests.tiers.redis_server import RedisServer


def test_a_balanced_budget_grows_with_the_time_that_documents_take_to_load(
    checkpoint: Folder, tmp_path: Path
) -> None:
    llm, prompt = tiered(checkpoint(), tmp_path), prompts()[2]
    fuse = Fuse("random", ratio=0.1, balanced=True)
    (held,) = llm.generate([prompt], PARAMS, fuse=fuse)
    tiering = llm.engine.tiering
    assert tiering.controller is not None and llm.engine.tiers is not None
    tiering.controller.compute_time.predict = lambda rows, pairs, **_: 1e-3 * rows  # type: ignore[method-assign]
    shares = []
    for seconds in (1e-5, 0.06, 0.1, 0.15):
        forget_pool(llm)
        llm.engine.tiers.predict = lambda tier, sizes, s=seconds: s  # type: ignore[method-assign,misc]
        (output,) = llm.generate([prompt], PARAMS, fuse=fuse)
        loading, settled = output.reuse.loading, output.reuse.fuse
        assert loading is not None and settled is not None and settled.balanced
        assert loading.ratio is not None and settled.ratio is not None
        assert loading.ratio == pytest.approx(settled.ratio, abs=0.02)
        shares.append(settled.ratio)
        # what was chosen is what that ratio chooses, wherever the documents are
        fixed = Fuse("random", ratio=settled.ratio)
        (same,) = llm.generate([prompt], PARAMS, fuse=fixed)
        assert same.token_ids == output.token_ids
    assert shares == sorted(shares) and shares[0] == 0.1
    assert 0.1 < shares[2] < shares[3]
    # documents that are computed sooner than loaded are computed, and no budget is raised for them
    forget_pool(llm)
    llm.engine.tiers.predict = lambda tier, sizes: 9.0  # type: ignore[method-assign]
    (output,) = llm.generate([prompt], PARAMS, fuse=fuse)
    assert output.reuse.fuse is not None and output.reuse.fuse.ratio == 0.1
    assert output.reuse.loading is None or not output.reuse.loading.tiers
    # what is in the pool takes no time to load
    assert held.reuse.fuse is not None and held.reuse.fuse.ratio == 0.1
    llm.close()


def test_a_budget_is_raised_past_what_replays_only_if_loads_take_no_longer_for_it(
    checkpoint: Folder, tmp_path: Path
) -> None:
    llm, prompt = tiered(checkpoint(), tmp_path), prompts()[2]
    fuse = Fuse("random", ratio=0.1, balanced=True)
    (first,) = llm.generate([prompt], PARAMS, fuse=fuse)
    tiering, tiers = llm.engine.tiering, llm.engine.tiers
    assert tiering.controller is not None and tiers is not None
    tiering.controller.compute_time.predict = lambda rows, pairs, **_: 1e-3 * rows  # type: ignore[method-assign]
    tiers.predict = lambda tier, sizes: 0.1  # type: ignore[method-assign]
    recomputed = sum(document.recomputed for document in first.reuse.documents)
    limit = first.reuse.text_tokens + recomputed + 12

    def rows(slowdown: float | None, replayed: int | None) -> int:
        assert tiering.controller is not None
        forget_pool(llm)
        tiers.slowdown = lambda tier: slowdown  # type: ignore[method-assign,union-attr]
        tiering.controller.replayed_rows = replayed
        (output,) = llm.generate([prompt], PARAMS, fuse=fuse)
        return output.reuse.text_tokens + sum(d.recomputed for d in output.reuse.documents)

    freely = rows(1.3, None)
    assert limit + 5 < freely <= 100
    # nobody knows yet how long a load takes beside a pass that replays
    assert limit - 2 <= rows(None, limit) <= limit
    # one beside launches takes no longer, or so little that it is worth it
    assert rows(1.0, limit) == freely and freely <= rows(1.04, limit) <= 104
    # or it does, and is tried again after a while
    several = [rows(1.3, limit) for _ in range(17)]
    assert [limit < n for n in several].count(True) == 1 and 100 < max(several) <= 130
    # a pass that is launched anyway hides behind what its loads take then
    assert 100 < rows(1.3, limit - 20) <= 130
    llm.close()


def test_all_is_computed_again_where_nearly_all_would_take_longer(
    checkpoint: Folder, tmp_path: Path
) -> None:
    """Of what is replaced as a whole nothing is read; the rest of a document is."""
    llm, prompt = tiered(checkpoint(), tmp_path), prompts()[2]
    fuse = Fuse("random", ratio=0.1, balanced=True)
    (first,) = llm.generate([prompt], PARAMS, fuse=fuse)
    # the first document stands where it was encoded
    again = sum(document.num_tokens for document in first.reuse.documents[1:])
    everything = 1e-3 * (first.reuse.text_tokens + again)
    tiering = llm.engine.tiering
    assert tiering.controller is not None and llm.engine.tiers is not None
    tiering.controller.compute_time.predict = (  # type: ignore[method-assign]
        lambda rows, pairs, blends=False: 1e-3 * rows * (2 if blends else 1)
    )
    ratios = []
    for load in (everything + 1e-4, everything - 1e-4):
        forget_pool(llm)
        llm.engine.tiers.predict = lambda tier, sizes, s=load: s  # type: ignore[method-assign,misc]
        (output,) = llm.generate([prompt], PARAMS, fuse=fuse)
        assert output.reuse.fuse is not None and output.reuse.fuse.ratio is not None
        ratios.append(output.reuse.fuse.ratio)
    llm.close()
    assert ratios[0] == 1.0 and 0.1 < ratios[1] < 0.5


def test_times_are_predicted_and_measured_in_the_report(checkpoint: Folder, tmp_path: Path) -> None:
    llm = tiered(checkpoint(), tmp_path)
    ask_with(llm, prompts(1), PARAMS)
    forget_pool(llm)
    assert llm.engine.tiers is not None
    llm.engine.tiers.predict = lambda tier, sizes: 1e-6  # type: ignore[method-assign]
    (answer,) = ask_with(llm, prompts(1), PARAMS)
    loading = answer.output.reuse.loading
    assert loading is not None and loading.tiers == ("disk",)
    assert loading.load_predicted == 1e-6
    assert loading.total_predicted is not None and loading.total_predicted > 1e-6
    assert loading.load_seconds is not None and loading.total_seconds is not None
    assert 0 < loading.load_seconds < loading.total_seconds
    assert "from disk: expected 0.0 ms, took " in str(answer.output.reuse)
    assert loading.num_bytes == llm.engine.tiers.num_bytes(answer.output.reuse.document_tokens)
    llm.close()


@pytest.mark.parametrize("selector", ["random", "first", "question", "links", "deviation"])
def test_a_budget_in_seconds_is_what_the_pass_can_compute_in_them(
    checkpoint: Folder, selector: Literal["random", "first", "question", "links", "deviation"]
) -> None:
    llm, prompt = make_llm(checkpoint()), prompts()[2]
    compute_time = ComputeTime()
    compute_time.predict = lambda rows, pairs, **_: 1e-3 * rows  # type: ignore[method-assign]
    llm.engine.tiering.measured_compute_time = lambda: compute_time
    layers = {"check_layers": (1,)} if selector == "deviation" else {}
    counts = []
    for seconds in (1e-4, 0.05, 0.08, 9.0):
        fuse = Fuse(selector, seconds=seconds, **layers)
        (output,) = llm.generate([prompt], PARAMS, fuse=fuse)
        settled, loading = output.reuse.fuse, output.reuse.loading
        counts.append(sum(document.recomputed for document in output.reuse.documents))
        text = output.reuse.text_tokens
        # links spend a part of their budget on looking
        assert text + counts[-1] <= max(1e3 * seconds, text)
        if not counts[-1]:
            continue
        assert settled is not None and settled.seconds is None
        assert loading is not None and loading.ratio is not None and 0 < loading.ratio <= 1
        # the same answer as by the budget that this was
        (same,) = llm.generate([prompt], PARAMS, fuse=settled)
        assert same.token_ids == output.token_ids
    assert counts == sorted(counts) and counts[0] == 0
    assert 0 < counts[1] < counts[2] < counts[3]


def test_a_model_whose_pace_nobody_knows_is_timed_when_a_budget_is_a_time(
    checkpoint: Folder,
) -> None:
    llm, prompt = make_llm(checkpoint()), prompts()[2]
    (output,) = llm.generate([prompt], PARAMS, fuse=Fuse("random", seconds=60.0))
    assert output.reuse.fuse is not None and output.reuse.fuse.ratio == pytest.approx(1, abs=0.01)
    known = llm.engine.tiering.measured_compute_time()
    assert (
        llm.engine.tiering.measured_compute_time() is known and known.predict(10, 100) is not None
    )
    llm.engine.check()


def test_documents_come_now_and_then_from_a_tier_that_was_slower(
    checkpoint: Folder, tmp_path: Path, redis_server: RedisServer
) -> None:
    llm = tiered(checkpoint(), tmp_path, remote_url=redis_server.url)
    right = ask_with(llm, prompts(1), PARAMS)
    forget_pool(llm)
    load_always(llm)
    tiers, came = llm.engine.tiers, []
    assert tiers is not None
    # what is measured here changes nothing
    seconds = {"disk": 1.0, "remote": 1.5}
    tiers.predict = lambda name, _: seconds[name]  # type: ignore[method-assign]
    for _ in range(17):
        answers = ask_with(llm, prompts(1), PARAMS)
        assert_same_answers(answers, right)
        came += [d.tier for d in answers[0].output.reuse.documents]
        forget_pool(llm)
    assert came == ["disk"] * 15 + ["remote", "disk"]
    llm.close()
