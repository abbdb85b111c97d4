"""The order of eviction: entries of one reader first, and no entry stays for ever."""

import random

import pytest

from looseleaf.kv.segmented_lru import SegmentedLru


def hits(lru: bool, traffic: list[int], room: int) -> float:
    """The share of repeated keys that are cached; a negative key is named once."""
    order, num_repeated, num_hits = SegmentedLru[int](room), 0, 0
    for key in traffic:
        known = key in order
        num_hits += known
        if known:
            order.remove(key)
        order.add(key, 1, reused=known and not lru)
        while order.size > room:
            order.pop()
        num_repeated += key >= 0
    return num_hits / num_repeated


def traffic_of(rng: random.Random, first: int, steps: int) -> list[int]:
    """Popular documents, each followed by a text that no other request has."""
    documents = rng.choices(range(100), weights=[1 / (n + 1) for n in range(100)], k=steps)
    return [key for n, d in enumerate(documents) for key in (first + d, -first - n - 1)]


def test_documents_stay_beside_texts_that_no_request_repeats() -> None:
    traffic = traffic_of(random.Random(0), 0, 4000)
    assert hits(False, traffic, 40) > hits(True, traffic, 40) + 0.1


def test_documents_of_new_traffic_replace_those_of_old() -> None:
    rng = random.Random(1)
    traffic = traffic_of(rng, 0, 2000) + traffic_of(rng, 10_000, 4000)
    assert hits(False, traffic, 40) > hits(True, traffic, 40)


def test_entries_leave_in_order_and_sizes_add_up() -> None:
    order = SegmentedLru[str](10)
    for key, reused in (("a", True), ("b", False), ("c", True), ("d", False)):
        order.add(key, 2, reused=reused)
    assert (len(order), order.size, [*order]) == (4, 8, ["b", "d", "a", "c"])
    # five reused entries exceed eight tenths: the oldest becomes the newest of the others
    for key in "efg":
        order.add(key, 2, reused=True)
    assert [*order] == ["b", "d", "a", "c", "e", "f", "g"]
    order.remove("d")
    assert [order.pop() for _ in range(6)] == ["b", "a", "c", "e", "f", "g"]
    assert order.size == 0 and "a" not in order
    with pytest.raises(KeyError):
        order.pop()
