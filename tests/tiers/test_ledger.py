"""Who stays in a tier of limited size."""

from hypothesis import given
from hypothesis import strategies as st

from looseleaf.tiers import Entry, Ledger
from tests.tiers.records import key


def come(ledger: Ledger, number: int, size: int = 10, tenant: str = "") -> bool:
    """A record is asked for, and stored if it is not there; whether it is there then."""
    if ledger.find(key(number)) is not None:
        ledger.touch(key(number))
        return True
    ledger.remove(key(number))
    victims = ledger.victims(size, tenant, key(number))
    if victims is None:
        return False
    for entry in victims:
        ledger.remove(entry.key, remember=True)
    ledger.add(Entry(key(number), size, tenant, ledger.clock()))
    return True


def there(ledger: Ledger) -> list[int]:
    return [int.from_bytes(entry.key, "big") for entry in ledger]


def test_a_scan_of_one_off_records_never_drives_a_hot_one_out() -> None:
    ledger = Ledger(100)
    hot = range(8)
    for _ in range(2):
        for number in hot:
            come(ledger, number)
    for number in range(1000, 2000):
        come(ledger, number)
    assert set(hot) <= set(there(ledger))


def test_the_least_recently_used_of_the_fresh_goes_first() -> None:
    ledger = Ledger(30)
    for number in (1, 2, 3):
        come(ledger, number)
    come(ledger, 4)
    assert there(ledger) == [2, 3, 4]


def test_what_had_to_go_comes_back_hot() -> None:
    ledger = Ledger(50)
    for number in range(6):
        come(ledger, number)
    assert 0 not in there(ledger)
    come(ledger, 0)
    for number in range(100, 200):
        come(ledger, number)
    assert 0 in there(ledger)


def test_hot_records_that_nobody_asks_for_any_more_make_room_for_new_hot_ones() -> None:
    ledger = Ledger(100)
    for _ in range(3):
        for number in range(8):
            come(ledger, number)
    for _ in range(3):
        for number in range(50, 58):
            come(ledger, number)
    assert set(range(50, 58)) <= set(there(ledger))


def test_a_tenant_over_its_quota_makes_room_by_its_own_records() -> None:
    ledger = Ledger(100, tenant_share=0.3)
    for number in range(5):
        come(ledger, number, tenant="red")
    for number in range(10, 20):
        come(ledger, number, tenant="blue")
    assert there(ledger) == [2, 3, 4, 17, 18, 19]
    assert not come(ledger, 30, size=31, tenant="green")


def test_pinned_and_open_records_stay() -> None:
    ledger = Ledger(30)
    for number in (1, 2, 3):
        come(ledger, number)
    for number, name in ((1, "pinned"), (2, "readers")):
        entry = ledger.find(key(number))
        assert entry is not None
        setattr(entry, name, 1)
    come(ledger, 4)
    come(ledger, 5)
    assert set(there(ledger)) == {1, 2, 5}
    assert not come(ledger, 6, size=11)


def test_records_past_their_time_are_not_found_and_go_first() -> None:
    now = [0.0]
    ledger = Ledger(30, ttl=10.0, clock=lambda: now[0])
    come(ledger, 1)
    come(ledger, 1)
    now[0] = 8.0
    come(ledger, 2)
    come(ledger, 3)
    now[0] = 12.0
    assert ledger.find(key(1)) is None
    assert [int.from_bytes(e.key, "big") for e in ledger.expired()] == [1]
    come(ledger, 4)
    assert set(there(ledger)) == {2, 3, 4}


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 40), st.sampled_from("abc"))))
def test_the_sums_are_those_of_the_entries_and_never_over_a_limit(
    requests: list[tuple[int, int, str]],
) -> None:
    ledger = Ledger(100, tenant_share=0.5)
    for number, size, tenant in requests:
        come(ledger, number, size, tenant)
        held = {t: sum(e.num_bytes for e in ledger if e.tenant == t) for t in "abc"}
        assert ledger.used == sum(held.values()) <= 100
        assert all(total <= 50 for total in held.values())
