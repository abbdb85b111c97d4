"""What is known of a tier's speed holds for other numbers of hands, and beside other passes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from looseleaf.graphs.layerwise import LayerwiseWait
from looseleaf.tiers.transfer.speed import Probe, TierSpeed


@given(
    st.floats(0, 0.01),
    st.floats(1e7, 1e10),
    st.floats(0, 1),
    st.integers(2, 8),
    st.integers(1, 12),
)
def test_probes_by_one_hand_and_by_all_tell_of_any_number(
    latency: float, rate: float, sharing: float, hands: int, others: int
) -> None:
    def seconds(num_bytes: int, hands: int) -> float:
        return latency + num_bytes * (1 + sharing * (hands - 1)) / rate

    speed = TierSpeed()
    sizes = (10**6, 10**8, 10**9)
    speed.observe_probes([Probe(n, seconds(n, 1), seconds(n, hands), hands) for n in sizes])
    expected = seconds(10**8, others)
    # how much a latency hides of what hands take from each other
    off = (1 + latency * rate / 10**9) * (1 + others / hands) * latency
    assert speed.predict(10**8, others) == pytest.approx(expected, rel=0.02, abs=0.002 + off)


def test_a_tier_of_which_nothing_was_read_is_not_known() -> None:
    speed = TierSpeed()
    speed.observe_probes([])
    assert speed.predict(1000) is None and not speed.calibrated


def test_loads_beside_launches_tell_how_much_longer_they_take_and_how_long_others_do() -> None:
    speed = TierSpeed()
    speed.observe_probes([Probe(10**6, 0.5, 0.5, 1)])
    # of a tier that was only probed nobody knows what a load takes longer than
    speed.observe_load(10**7, 0.12, launched=True)
    assert speed.slowdown is None and not speed.calibrated
    for _ in range(20):
        speed.observe_load(10**7, 0.1, launched=False)
    assert speed.calibrated and speed.slowdown is None
    for _ in range(9):
        speed.observe_load(10**7, 0.12, launched=True)
    assert speed.slowdown == pytest.approx(1.2, rel=0.02)
    assert speed.predict(10**7) == pytest.approx(0.1, rel=0.02)
    # a tier that becomes slow is known to be, whatever its loads are beside
    for _ in range(30):
        speed.observe_load(10**7, 1.2, launched=True)
    predicted, slowdown = speed.predict(10**7), speed.slowdown
    assert predicted is not None and slowdown is not None
    assert predicted * slowdown == pytest.approx(1.2, rel=0.1)
    # and what comes sooner beside a pass than without was late by chance
    for _ in range(30):
        speed.observe_load(10**7, 0.1, launched=False)
    for _ in range(30):
        speed.observe_load(10**7, 0.08, launched=True)
    assert speed.slowdown is not None and 1.0 <= speed.slowdown < 1.02
    assert speed.predict(10**7) == pytest.approx(0.08, rel=0.05)


@pytest.mark.parametrize("timed", [True, False])
def test_what_a_launched_pass_awaits_on_a_gpu_hears_of_it(timed: bool) -> None:
    class Coming:
        beside = False

        def sent_by(self, layer: int) -> None:
            return None

        def cancel(self) -> None:
            pass

        def beside_launches(self) -> None:
            self.beside = True

    one = Coming()
    LayerwiseWait(lambda layer, q, k, v: torch.empty(0), [one], timed=timed)
    assert one.beside is timed
