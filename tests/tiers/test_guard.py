"""A breaker opens by failures in a row, and closes by what began behind them."""

from looseleaf.tiers.guard import Breaker


def test_a_call_that_began_before_the_failures_does_not_close_a_breaker() -> None:
    now = [0.0]
    breaker = Breaker(threshold=3, cooldown=5.0, clock=lambda: now[0])
    assert all(breaker.allow() for _ in range(4))
    assert [breaker.book(well=False) for _ in range(3)] == [False, False, True]
    # the fourth call ends now, and moved nothing
    breaker.book(well=True, proof=False)
    assert breaker.is_open and not breaker.allow()
    # one that tries again lets others try, until the next failure
    now[0] = 6.0
    assert breaker.allow() and not breaker.allow()
    breaker.book(well=True, proof=False)
    assert breaker.allow()
    assert breaker.book(well=False) and breaker.is_open
    now[0] = 12.0
    assert breaker.allow()
    breaker.book(well=True)
    assert breaker.allow() and not breaker.book(well=False)
