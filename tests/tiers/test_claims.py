"""Of several engines one computes a document: claims, their expiry, take-over and failure."""

import threading

import pytest

from looseleaf.tiers import RemoteTier, TierFault
from looseleaf.tiers.claims import Claims
from looseleaf.tiers.stores.objects import ObjectTier
from tests.tiers.records import key, put


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Store:
    """A shared store in memory whose clock is the test's."""

    def __init__(self, clock):
        self.clock, self.records, self.claims, self.broken = clock, set(), {}, False
        self.calls = 0

    def contains(self, keys):
        self.calls += 1
        if self.broken:
            raise TierFault("timeout", "no answer")
        return [item in self.records for item in keys]

    def claim(self, item, owner, seconds):
        holder, end = self.claims.get(item, (None, -1.0))
        if holder in (None, owner) or end <= self.clock():
            self.claims[item] = owner, self.clock() + seconds
            return True
        return False

    def release(self, item, owner):
        if self.claims.get(item, (None,))[0] == owner:
            del self.claims[item]


@pytest.fixture
def shared():
    return Store(Clock())


def engine(store, computing=True, **options):
    """Claims without a thread: tests take its steps."""
    claims = Claims(store, lambda item: computing, clock=store.clock, **options)
    claims._start = lambda: None
    return claims


def later(store, seconds, *engines):
    """The engines' threads at work for a while."""
    end = store.clock.now + seconds
    while store.clock.now < end:
        store.clock.now += 0.25
        for claims in engines:
            claims.step()


def test_one_engine_computes_and_the_others_wait_for_the_record(shared):
    first, second = engine(shared), engine(shared)
    assert first.awaits([key(1)]) and second.awaits([key(1)])
    first.step()
    second.step()
    assert not first.awaits([key(1)]) and second.awaits([key(1)])
    # it takes longer than a claim holds
    later(shared, 25, first, second)
    assert second.awaits([key(1)])
    shared.records.add(key(1))
    first.stored(key(1))
    later(shared, 2, first, second)
    assert not second.awaits([key(1)]) and not shared.claims


def test_a_claim_of_a_dead_engine_is_taken_over_by_one(shared):
    first, second, third = engine(shared), engine(shared), engine(shared)
    for claims in (first, second, third):
        claims.awaits([key(1)])
        claims.step()
    # the first one ends
    later(shared, 12, second, third)
    assert sorted([second.awaits([key(1)]), third.awaits([key(1)])]) == [False, True]


def test_a_claim_without_a_computation_is_given_up(shared):
    first, second = engine(shared, computing=False), engine(shared)
    for claims in (first, second):
        claims.awaits([key(1)])
        claims.step()
    later(shared, 8, first, second)
    assert not second.awaits([key(1)])


def test_a_store_that_fails_makes_nobody_wait(shared):
    claims = engine(shared)
    shared.broken = True
    assert claims.awaits([key(1)])
    claims.step()
    assert not claims.awaits([key(1)]) and not claims.awaits([key(2)])
    calls = shared.calls
    claims.step()
    assert shared.calls == calls


def test_patience_ends(shared):
    first, second = engine(shared), engine(shared, patience=20.0)
    for claims in (first, second):
        claims.awaits([key(1)])
        claims.step()
    later(shared, 19, first, second)
    assert second.awaits([key(1)])
    later(shared, 3, first, second)
    assert not second.awaits([key(1)])


def test_waiting_engines_ask_less_and_less(shared):
    first, second = engine(shared), engine(shared)
    for claims in (first, second):
        claims.awaits([key(1)])
        claims.step()
    later(shared, 5, first, second)
    calls = shared.calls
    later(shared, 9, second)
    # half a second on average, from a quarter to three quarters
    assert shared.calls - calls <= 40


def test_states_are_forgotten(shared):
    shared.records.add(key(1))
    claims = engine(shared)
    claims.awaits([key(1)])
    later(shared, 20, claims)
    assert not claims._entries


def test_a_thread_does_all_this(shared):
    claims = Claims(shared, lambda item: True, clock=shared.clock)
    claims.awaits([key(1)])
    while claims.awaits([key(1)]):
        claims.wait(5)
    claims.close()
    assert claims.thread is not None
    claims.thread.join(10)
    assert not claims.thread.is_alive() and not shared.claims


@pytest.fixture(params=["redis", "objects"])
def tier(request):
    if request.param == "redis":
        return RemoteTier(request.getfixturevalue("redis_server").url)
    return ObjectTier(request.getfixturevalue("s3_server").url)


def test_a_shared_tier_grants_a_claim_to_one(tier):
    granted = []
    threads = [
        threading.Thread(target=lambda n=n: granted.append(tier.claim(key(1), f"{n}", 60.0)))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(granted) == [False, False, False, True]


def test_claims_are_renewed_expire_and_end_by_their_owner_only(tier):
    assert tier.claim(key(1), "a", 60.0) and tier.claim(key(1), "a", 60.0)
    tier.release(key(1), "b")
    assert not tier.claim(key(1), "b", 60.0)
    tier.release(key(1), "a")
    tier.release(key(1), "a")
    assert tier.claim(key(1), "b", 60.0)
    # a claim is no record
    assert tier.contains([key(1)]) == [False] and not list(tier.entries())
    put(tier, 1)
    assert tier.contains([key(1)]) == [True]


def test_an_old_claim_in_an_object_store_is_taken_over(s3_server):
    tier = ObjectTier(s3_server.url)
    assert tier.claim(key(1), "a", 60.0)
    assert tier.claim(key(1), "b", 0.0) and not tier.claim(key(1), "a", 60.0)
