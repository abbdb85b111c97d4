"""A breaker opens by failures in a row, and closes by what began behind them."""

from pathlib import Path

import pytest

from looseleaf.tiers import DiskTier, Ledger, Tier, TierFault
from looseleaf.tiers.guard import Breaker, Guard
from tests.tiers.records import key, put


def test_a_call_that_began_before_the_failures_does_not_close_a_breaker() -> None:
    now = [0.0]
    breaker = Breaker(threshold=3, cooldown=5.0, clock=lambda: now[0])
    assert all(breaker.allow() for _ in range(4))
    assert [breaker.record(well=False) for _ in range(3)] == [False, False, True]
    # the fourth call ends now, and moved nothing
    breaker.record(well=True, proof=False)
    assert breaker.is_open and not breaker.allow()
    # one that tries again lets others try, until the next failure
    now[0] = 6.0
    assert breaker.allow() and not breaker.allow()
    breaker.record(well=True, proof=False)
    assert breaker.allow()
    assert breaker.record(well=False) and breaker.is_open
    now[0] = 12.0
    assert breaker.allow()
    breaker.record(well=True)
    assert breaker.allow() and not breaker.record(well=False)


class Folder(DiskTier):
    """One that can't be written to."""

    def put(self, *args: object, **options: object) -> bool:
        raise TierFault("unavailable", "read-only")


def test_a_tier_that_cannot_be_written_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(DiskTier(tmp_path, Ledger(1 << 20)), 1)
    tier = Folder(tmp_path, Ledger(1 << 20))
    guard = Guard(tier, tier.counters)
    for _ in range(5):
        assert not guard.call(lambda tier: put(tier, 2), False, writes=True)
    assert tier.counters.faults == {"unavailable": 3} and tier.counters.skipped == 2
    assert guard.call(lambda tier: tier.contains([key(1)]), [False]) == [True]
    assert guard.writing.is_open and not guard.breaker.is_open
    assert [r.message.split(":")[0] for r in caplog.records] == [
        "the disk tier failed for the first time",
        "the disk tier keeps failing and is not written to for 5 s at a time",
    ]


def test_a_tier_that_cannot_be_read_is_not_written(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, Ledger(1 << 20))
    guard = Guard(tier, tier.counters)

    def fail(tier: Tier) -> bool:
        raise TierFault("unavailable", "gone")

    for _ in range(3):
        guard.call(fail, False)
    assert not guard.call(lambda tier: put(tier, 1), False, writes=True)
    assert list(tmp_path.glob("*.segment")) == []
