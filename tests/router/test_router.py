"""Laws of the choice of a replica: locality, minimal movement, bounded load, no starvation."""

import math

from hypothesis import given
from hypothesis import strategies as st

from looseleaf.router import Affinity, LoadLimits, Router

TAGS = st.text("0123456789abcdef", min_size=4, max_size=4)
DOCUMENTS = st.dictionaries(TAGS, st.integers(1, 4000), min_size=1, max_size=5)
AFFINITIES = DOCUMENTS.map(lambda documents: Affinity(tuple(documents.items())))
REPLICAS = st.lists(st.text("abcxyz", min_size=1, max_size=3), min_size=2, max_size=7, unique=True)


def router(**limits) -> Router:
    return Router(lambda: 0.0, LoadLimits(**limits))


@given(AFFINITIES, REPLICAS)
def test_the_same_request_gets_the_same_replica(affinity, replicas):
    at_work = router()
    first = at_work.order(affinity, replicas)[0]
    assert at_work.order(affinity, replicas[::-1])[0] == first
    # another process agrees
    assert router().order(affinity, replicas)[0] == first


@given(st.lists(AFFINITIES, min_size=1, max_size=20), REPLICAS)
def test_a_replica_that_joins_or_leaves_moves_only_its_own_requests(affinities, replicas):
    *rest, changed = replicas
    for affinity in affinities:
        before = router().order(affinity, replicas)[0]
        after = router().order(affinity, rest)[0]
        assert before == changed or after == before


@given(
    st.lists(st.tuples(AFFINITIES, st.booleans()), max_size=60),
    REPLICAS,
    st.floats(1.0, 2.0),
    st.integers(1, 4),
)
def test_no_replica_exceeds_the_bound_and_every_request_gets_one(steps, replicas, factor, slack):
    at_work, running = router(factor=factor, slack=slack), []
    for affinity, ends in steps:
        replica = at_work.order(affinity, replicas)[0]
        at_work.begin(replica, affinity)
        running.append(replica)
        bound = max(slack, math.ceil(factor * len(running) / len(replicas)))
        assert running.count(replica) <= bound
        if ends:
            at_work.end(running.pop(0))


@given(AFFINITIES, REPLICAS)
def test_a_hot_document_gets_more_replicas(affinity, replicas):
    at_work, chosen = router(slack=1), set()
    for _ in range(4 * len(replicas)):
        chosen.add(replica := at_work.order(affinity, replicas)[0])
        at_work.begin(replica, affinity)
    assert len(chosen) >= math.ceil(len(replicas) / 1.25)


@given(AFFINITIES, REPLICAS)
def test_recent_requests_are_shared_even_if_each_ends_before_the_next(affinity, replicas):
    at_work, counts = router(recent_slack=2.0), dict.fromkeys(replicas, 0)
    total = 20 * len(replicas)
    for _ in range(total):
        replica = at_work.order(affinity, replicas)[0]
        at_work.begin(replica, affinity)
        at_work.end(replica)
        counts[replica] += 1
    assert max(counts.values()) <= 1.25 * (total + 1) / len(replicas) + 1


@given(AFFINITIES, REPLICAS)
def test_a_holder_is_preferred_to_the_best_by_hash(affinity, replicas):
    at_work = router()
    holder = at_work.order(affinity, replicas)[-1]
    at_work.report(holder, dict(affinity.documents))
    assert at_work.order(affinity, replicas)[0] == holder
    # a replica that has left holds nothing
    at_work.forget(holder)
    assert at_work.order(affinity, replicas)[-1] == holder


@given(REPLICAS)
def test_a_conversation_stays(replicas):
    at_work, turn = router(), Affinity((), "chat", 10)
    first = at_work.order(turn, replicas)[0]
    at_work.begin(first, turn)
    at_work.begin(first, Affinity())
    assert at_work.order(turn, replicas)[0] == first
    assert at_work.order(Affinity(), replicas)[0] != first


@given(REPLICAS, st.integers(1, 30))
def test_requests_without_documents_go_to_the_least_load(replicas, number):
    at_work, counts = router(), dict.fromkeys(replicas, 0)
    for _ in range(number):
        replica = at_work.order(Affinity(), replicas)[0]
        counts[replica] += 1
        at_work.begin(replica, Affinity())
    assert max(counts.values()) - min(counts.values()) <= 1


def test_recent_requests_are_forgotten():
    now = [0.0]
    at_work = Router(lambda: now[0], LoadLimits(recent_slack=1.0))
    for _ in range(10):
        at_work.begin("a", Affinity())
        at_work.end("a")
    assert at_work.loads.eligible(["a", "b"]) == ["b"]
    now[0] = 3600.0
    assert at_work.loads.eligible(["a", "b"]) == ["a", "b"]


@given(REPLICAS, st.integers(1, 5))
def test_a_request_that_is_withdrawn_leaves_no_count(replicas, number):
    at_work, replica = router(), replicas[0]
    at_work.loads.begin(replica)
    for _ in range(number):
        at_work.loads.begin(replica)
    for _ in range(number):
        at_work.loads.withdraw(replica)
    assert at_work.loads.running(replica) == at_work.loads.recent(replica) == 1
    at_work.loads.withdraw("of no request")


def test_no_replicas_are_no_order():
    assert router().order(Affinity(), []) == []


def test_old_conversations_are_forgotten():
    at_work = Router(lambda: 0.0, max_conversations=2)
    for number in range(3):
        at_work.begin("b", Affinity((), f"chat {number}", 10))
        at_work.end("b")
    assert at_work.order(Affinity((), "chat 2", 10), ["a", "b"])[0] == "b"
    assert at_work.order(Affinity((), "chat 0", 10), ["a", "b"])[0] == "a"
