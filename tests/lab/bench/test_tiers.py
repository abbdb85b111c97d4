"""``bench tiers``: a throttled tier is as slow as it says, and rows compare like with like."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from looseleaf_lab.bench import tiers
from looseleaf_lab.bench.throttled import ThrottledTier
from looseleaf_lab.bench.tiers import TierBench, measure, of_checkpoint
from tests.checkpoints import make_checkpoint
from tests.tiers.records import LAYER_BYTES, LAYERS, content, key, put, read
from tests.tiers.redis_server import find_redis


def test_a_throttled_tier_takes_its_time_and_gives_what_was_stored() -> None:
    tier = ThrottledTier("slow", rate=LAYER_BYTES / 0.02, latency=0.03, num_bytes=1 << 20)
    put(tier, 1)
    begun = time.perf_counter()
    found = read(tier, 1)
    assert time.perf_counter() - begun >= 0.03 + LAYERS * 0.02
    assert found is not None and torch.equal(found, content(1))
    assert tier.contains([key(1), key(2)]) == [True, False]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_tier_has_its_sweep_the_controller_and_what_is_computed(tmp_path: Path) -> None:
    find_redis()
    folder = make_checkpoint(tmp_path / "model")
    make = of_checkpoint(folder, "cpu", 640)
    config = TierBench(make, "tiny", ratios=(0.15, 1.0), repetitions=1)
    rows = list(measure(config, ["a b c d " * 6, "e f g h " * 5], "what?", tmp_path))
    places = ["fast", "medium", "slow", "disk", "remote"]
    arms = [(row["tier"], row["arm"], row["ratio"]) for row in rows if row["arm"] != "controller"]
    assert arms == [
        (place, arm, ratio)
        for place in places
        for arm, ratio in (("sweep", 0.15), ("sweep", 1.0), ("computed", 0.15))
    ]
    assert [row["tier"] for row in rows if row["arm"] == "controller"] == [*places, "all"]
    for row in rows:
        if row["arm"] == "computed":
            assert row["loaded_from"] == "nowhere"
        if row["arm"] == "sweep":
            # all documents, however slow the tier is
            assert row["loaded_from"] == row["tier"] and row["mib"] == max(r["mib"] for r in rows)
        assert float(row["seconds"]) > 0 and float(row["times_best"]) > 0


def test_the_controller_of_all_tiers_has_seen_as_many_loads_as_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Counter[tuple[str, str]]()
    ask = tiers._answer

    def counted(place: Any, arm: Any, prompt: Any) -> Any:
        asked[place.name, arm.label] += 1
        return ask(place, arm, prompt)

    monkeypatch.setattr(tiers, "_answer", counted)
    make = of_checkpoint(make_checkpoint(tmp_path / "model"), "cpu", 640)
    config = TierBench(make, "tiny", ratios=(0.15, 0.4, 1.0), repetitions=1)
    rows = list(measure(config, ["a b c d " * 6, "e f g h " * 5], "what?", tmp_path))
    assert asked["all", "controller"] == asked["fast", "sweep"] + asked["fast", "controller"] == 8
    assert [row["repetitions"] for row in rows if row["tier"] == "all"] == [1]
