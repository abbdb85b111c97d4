"""The simulation conserves requests, agrees with closed forms, and ranks routers as it must."""

import json
from dataclasses import replace

import pytest

from looseleaf_lab.bench.endpoint.trace import read_trace
from looseleaf_lab.bench.fleet.costs import Costs
from looseleaf_lab.bench.fleet.requests import (
    FleetRequest,
    ZipfConfig,
    trace_requests,
    zipf_requests,
)
from looseleaf_lab.bench.fleet.simulate import POLICIES, FleetConfig, Simulation, simulate

COSTS = Costs(step=0.01, prefill=1e-4, row=0.0, overhead=0.002)
TRAFFIC = ZipfConfig(requests=1500, documents=150, rate=15.0, document_tokens=100)
ROOM = FleetConfig(replicas=3, room=30 * 100)


def figures(**changes):
    return simulate(zipf_requests(TRAFFIC), ROOM, COSTS, **changes)


def test_one_request_takes_what_its_steps_take():
    request = FleetRequest(0.0, ((1, 100),), 20, 3)
    run = Simulation(FleetConfig(replicas=1, room=1000, policy="round robin"), COSTS)
    run.run([request])
    # one step of 120 new tokens, then two of one row
    assert run.first_tokens == [pytest.approx(0.01 + 120 * 1e-4 + 0.002)]
    assert run.now == pytest.approx(0.002 + 0.01 + 120 * 1e-4 + 2 * 0.01)


def test_a_single_client_waits_for_nothing_but_its_own_work():
    requests = [FleetRequest(0.0, ((1, 100),), 20, 3)] * 2
    run = Simulation(FleetConfig(replicas=1, room=1000, clients=1), replace(COSTS, first_delay=0.5))
    run.run(requests)
    first, again = 0.002 + 0.01 + 120 * 1e-4, 0.002 + 0.01 + 20 * 1e-4
    assert run.first_tokens == [pytest.approx(first + 0.5), pytest.approx(again + 0.5)]
    assert run.now == pytest.approx(first + again + 2 * 2 * 0.01)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_requests_end_and_pools_keep_their_room(policy):
    run = Simulation(FleetConfig(replicas=3, room=3000, policy=policy), COSTS)
    run.run(zipf_requests(TRAFFIC))
    assert len(run.first_tokens) == TRAFFIC.requests
    assert sum(replica.requests for replica in run.replicas) == TRAFFIC.requests
    for replica in run.replicas:
        assert replica.pool.size == sum(replica._sizes.values()) <= replica.room
        assert not (replica.computing or replica.active or replica.waiting)


def test_routing_by_documents_is_near_one_engine_with_all_room():
    documents, turns = figures(policy="documents"), figures(policy="round robin")
    one = figures(policy="one engine")
    assert documents["hits"] > 0.9 * one["hits"] and documents["hits"] > 1.2 * turns["hits"]
    assert documents["load_over_mean"] < 1.3


def test_a_shared_tier_leaves_one_computation_of_each_document():
    requests = zipf_requests(TRAFFIC)
    row = simulate(requests, ROOM, COSTS, shared=True)
    seen = {number for request in requests for number, _ in request.documents}
    computed = (1 - row["hits"]) * len(requests)
    # two replicas may begin before one has stored it
    assert len(seen) <= round(computed) <= 1.1 * len(seen)
    assert row["gb_moved"] > 0 and figures()["gb_moved"] == 0


def test_replicas_that_share_cores_are_slower():
    alone = figures()["first_token_p99"]
    crowded = simulate(
        zipf_requests(TRAFFIC), ROOM, Costs(step=0.01, prefill=1e-4, row=0.0, cores=1)
    )
    assert crowded["first_token_p99"] > alone


def test_requests_depend_on_the_seed_only():
    assert zipf_requests(TRAFFIC) == zipf_requests(TRAFFIC)
    times = [request.arrival for request in zipf_requests(TRAFFIC)]
    assert times == sorted(times) and times[-1] == pytest.approx(100, rel=0.1)


def test_blocks_of_a_trace_are_documents():
    line = {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 7, 9]}
    later = {**line, "timestamp": 3000}
    trace = read_trace([json.dumps(line), json.dumps(later)], "trace")
    first, second = trace_requests(trace, speed=2.0)
    assert first == FleetRequest(0.0, ((7, 512),), 76, 5) and second.arrival == 1.0
