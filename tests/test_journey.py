"""How much of the library a request and a decode step pass, and that plain ones pass no feature."""

import pytest

from tools.journey import Journey, journeys

# files, and calls of a step
LIMITS = {"request": 51, "decode step": 23, "fuse request": 59}
MOST_CALLS = 290
FEATURES = (
    "blend/", "retro/", "sparse/", "tiers/", "index/",
    "attention/select/attend_pages", "attention/select/candidates", "attention/select/device_topk",
    "attention/select/policy", "attention/select/worklist", "engine/background", "engine/canary",
    "engine/documents/", "engine/features", "engine/runner/eviction", "engine/runner/microbatches",
    "engine/tiering/", "graphs/late_rows", "graphs/layerwise",
)  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> dict[str, Journey]:
    return {journey.name: journey for journey in journeys()}


@pytest.mark.parametrize("name", LIMITS)
def test_a_journey_passes_few_files(measured: dict[str, Journey], name: str) -> None:
    files = measured[name].files
    assert len(files) <= LIMITS[name], sorted(files)


def test_a_decode_step_makes_few_calls(measured: dict[str, Journey]) -> None:
    assert measured["decode step"].num_calls <= MOST_CALLS


def test_a_plain_decode_step_asks_no_feature(measured: dict[str, Journey]) -> None:
    files = measured["decode step"].files
    assert not [path for path in files if path.startswith(FEATURES)]


def test_a_plain_request_makes_nothing_of_features(measured: dict[str, Journey]) -> None:
    passed = [path for path in measured["request"].files if path.startswith(FEATURES)]
    assert not passed
