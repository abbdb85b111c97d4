"""What the controller chose and expected is in the report, and follows what it knows of times."""

from pathlib import Path

import pytest

from looseleaf import Fuse
from tests.engine.harness import Folder
from tests.engine.harness import ask as ask_with
from tests.engine.tiered import PARAMS, forget_pool, prompts, tiered


def test_a_balanced_budget_grows_with_the_time_that_documents_take_to_load(
    checkpoint: Folder, tmp_path: Path
) -> None:
    llm, prompt = tiered(checkpoint(), tmp_path), prompts()[2]
    fuse = Fuse("random", ratio=0.1, balanced=True)
    (held,) = llm.generate([prompt], PARAMS, fuse=fuse)
    tiering = llm.engine.tiering
    assert tiering.controller is not None and llm.engine.tiers is not None
    tiering.controller.pace.predict = lambda rows, pairs, **_: 1e-3 * rows  # type: ignore[method-assign]
    shares = []
    for seconds in (1e-5, 0.06, 0.1, 0.15, 9.0):
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
    assert shares == sorted(shares) and shares[0] == 0.1 and shares[-1] > 0.9
    assert 0.1 < shares[2] < 0.9
    # what is in the pool takes no time to load
    assert held.reuse.fuse is not None and held.reuse.fuse.ratio == 0.1
    llm.close()


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
    assert loading.num_bytes == llm.engine.tiers.num_bytes(answer.output.reuse.document_tokens)
    llm.close()
