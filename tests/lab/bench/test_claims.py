"""Claims of the papers on sharing and blending: hits, relay, lazy, and rate."""

from dataclasses import replace

import pytest
import torch

from looseleaf_lab.bench import arrivals, hits, lazy, rate, relay
from looseleaf_lab.bench.attention_cases import AttentionShape
from looseleaf_lab.bench.random_model import random_decoder

WORLD = hits.HitsConfig(documents=60, document_tokens=128, requests=200, skipped=40)
PAGES = 40  # of 64 tokens: 20 documents


@pytest.fixture(autouse=True)
def garbage_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's process holds so much that looking through it takes longer than what is measured."""
    monkeypatch.setattr("gc.collect", lambda: 0)


@pytest.fixture(scope="module")
def ratios() -> dict[str, float]:
    requests = hits.trace(WORLD, 1.1)
    return {name: hits.hit_ratio(WORLD, name, PAGES, requests) for name in hits.CACHES}


def test_storing_once_hits_more_often_than_a_copy_a_position_and_that_than_prefixes(
    ratios: dict[str, float],
) -> None:
    assert ratios["once"] > 1.3 * ratios["copies"] > 1.3 * ratios["prefix"]


def test_no_cache_hits_more_than_the_best_that_holds_as_much(ratios: dict[str, float]) -> None:
    assert ratios["once"] <= hits.closed_form(60, 20, 1.1)


def test_with_room_for_all_only_first_sights_are_missed() -> None:
    requests = hits.trace(replace(WORLD, skipped=0), 1.1)
    everything = replace(WORLD, skipped=0)
    seen: set[int] = set()
    first = 0
    for request in requests:
        new = [placed for placed in request if placed.number not in seen]
        first += sum(placed.length for placed in new)
        seen |= {placed.number for placed in new}
    total = sum(placed.length for request in requests for placed in request)
    assert hits.hit_ratio(everything, "once", 1000, requests) == pytest.approx(1 - first / total)


def test_at_one_document_a_request_a_copy_a_position_is_one_copy() -> None:
    config = replace(WORLD, per_request=1)
    requests = hits.trace(config, 1.1)
    once = hits.hit_ratio(config, "once", PAGES, requests)
    assert once == hits.hit_ratio(config, "copies", PAGES, requests)
    assert once == hits.hit_ratio(config, "prefix", PAGES, requests)


def test_documents_of_different_lengths_stand_at_more_positions() -> None:
    ragged = replace(WORLD, ragged=True)
    equal = hits.hit_ratio(WORLD, "copies", PAGES, hits.trace(WORLD, 1.1))
    assert hits.hit_ratio(ragged, "copies", PAGES, hits.trace(ragged, 1.1)) < 0.6 * equal


def test_a_prefix_ends_where_its_first_page_is_missing() -> None:
    config = replace(WORLD, per_request=2, skipped=0)
    one, two, other = (hits.PlacedDocument(n, 128, 0) for n in range(3))
    moved = hits.PlacedDocument(1, 128, 128)
    served = [[one, moved], [one, moved], [other, moved], [two, replace_offset(one)]]
    assert hits.hit_ratio(config, "prefix", 1000, served) == pytest.approx(256 / (4 * 256))
    assert hits.hit_ratio(config, "once", 1000, served) == pytest.approx((256 + 128 + 256) / 1024)
    assert hits.hit_ratio(config, "copies", 1000, served) == pytest.approx((256 + 128) / 1024)


def test_a_chain_loses_its_end_before_its_beginning() -> None:
    config = replace(WORLD, per_request=1, skipped=0)
    long, *short = (
        hits.PlacedDocument(0, 128, 0),
        hits.PlacedDocument(1, 64, 0),
        hits.PlacedDocument(2, 64, 0),
    )
    served = [[long], [short[0]], [short[1]], [hits.PlacedDocument(0, 64, 0)]]
    assert hits.hit_ratio(config, "prefix", 3, served) == pytest.approx(64 / 320)


def replace_offset(placed: hits.PlacedDocument) -> hits.PlacedDocument:
    return hits.PlacedDocument(placed.number, placed.length, 128)


def test_a_request_larger_than_the_pool_is_served_without_being_stored() -> None:
    config = replace(WORLD, skipped=0)
    requests = hits.trace(config, 1.1)
    assert hits.hit_ratio(config, "once", 1, requests) == 0.0


def test_the_closed_form_gives_the_papers_gain() -> None:
    assert hits.gain_in_closed_form(100, 20, 0.853) == pytest.approx(2.86, abs=0.005)
    assert hits.gain_in_closed_form(100, 1, 1.1) == 1.0


def test_rows_stand_beside_the_papers_figures_and_cacheblend_is_what_the_paper_counts() -> None:
    rows = {str(r["cache"]): r for r in hits.measure(replace(WORLD, requests=60), (1.0,), (2.1,))}
    assert rows["once"]["paper"] == 13.57 and rows["blended once"]["paper"] == ""
    assert rows["cacheblend"]["reused"] == pytest.approx(0.82 * float(rows["copies"]["reused"]))
    assert rows["cacheblend"]["paper"] == pytest.approx(0.82 * 7.27, abs=0.005)
    assert rows["once"]["documents_held"] == 8192 // 128


def test_the_model_of_relay_is_the_papers() -> None:
    assert relay.predicted(2048, 128, 32) == pytest.approx(2178 / 199)
    assert relay.predicted(512, 128, 1) < 1.0


TINY_RELAY = relay.RelayConfig(
    AttentionShape(2, 2, 16, layers=1, dtype=torch.float32), "cpu", prefixes=(48,), batches=(2,),
    private=8, shape="tiny", requests=3, output=4, shots=(1,), shot_tokens=16, repetitions=1,
    rate_seconds=0.01,
)  # fmt: skip


@pytest.fixture
def same_numbers() -> None:
    """A few small heads tell too little of rounding: about one draw in three hundred is refused."""
    torch.manual_seed(0)


@pytest.mark.usefixtures("same_numbers")
def test_relay_measures_all_arms_of_every_cell_and_line() -> None:
    rows = list(relay.measure(TINY_RELAY))
    operator, service = rows[:3], rows[3:]
    assert [row["arm"] for row in operator] == ["relay", "shared pages", "private copies"]
    assert operator[2]["predicted"] == relay.predicted(48, 8, 2) and operator[1]["predicted"] == ""
    lines = [str(row["measurement"]).split(" at ")[0] for row in service[::3]]
    assert lines == ["throughput", "1-shot questions", "rate"]
    assert all(float(row["median"]) >= 0 for row in service)
    assert {tuple(row) for row in operator} == {tuple(row) for row in service}


@pytest.mark.usefixtures("same_numbers")
def test_a_part_of_relay_is_measured_alone() -> None:
    for part, expected in (("operator", "decode attention"), ("few-shot", "1-shot questions")):
        assert {r["measurement"] for r in relay.measure(TINY_RELAY, (part,))} == {expected}


def relay_service() -> relay.Service:
    decoder = random_decoder(TINY_RELAY.shape, torch.device("cpu"))
    return relay.Service(TINY_RELAY, decoder, grouping=True)


def test_arms_of_relay_share_what_they_say() -> None:
    service = relay_service()
    for alike, expected in ((True, 48), (False, 0)):
        prompts = relay.make_prompts(48, 8, 3, shared_prefix=alike, vocabulary=512)
        service.engine.store.evict_idle()
        cached = []
        for prompt in prompts:
            progress = service.add(prompt, 1)
            while service.engine.has_work:
                service.engine.step()
            cached.append(progress.output().reuse.text_tokens_cached)
        assert cached == [0, expected, expected]


def test_rates_rise_to_that_of_requests_that_come_at_once() -> None:
    curve = relay._curve(relay._Arm(relay_service(), True), 48, 1e9)
    assert len(curve.rates) == 6 and curve.rates == sorted(curve.rates) and curve.rates[0] > 0
    # nothing takes so long
    curve.search()
    assert curve.refine() == curve.settle(1) == curve.rates[-1]


def test_nobody_waits_for_an_empty_engine_and_all_others_do() -> None:
    service = relay_service()
    now = iter(range(10**6))
    prompts = relay.make_prompts(48, 8, 3, shared_prefix=True, vocabulary=512)

    def asked(number: int) -> relay.RequestProgress:
        return service.add(prompts[number], 4)

    waited = arrivals.serve(service.engine, lambda: float(next(now)), asked, [0.0, 1e5, 1e5 + 1])
    assert max(one.last for one in waited) < 100
    assert all(0 < one.first < one.last for one in waited)
    together = arrivals.serve(service.engine, lambda: float(next(now)), asked, [0.0, 0.0, 0.0])
    assert together[0].last <= together[2].last


TINY = lazy.LazyConfig(
    "tiny", "cpu", documents=12, document_tokens=32, per_request=3, capacity=6, question=8,
    output=4, requests=24, skipped=8, alphas=(2.1,), breakdown_tokens=32, repetitions=1,
)  # fmt: skip


def test_lazy_measures_three_caches_and_where_the_time_goes() -> None:
    rows = list(lazy.measure(TINY))
    arms = ["once", "copies per position", "prefix caching"]
    assert [row["arm"] for row in rows[:6:2]] == [row["arm"] for row in rows[1:6:2]] == arms
    assert [row["paper"] for row in rows[:6]] == ["", "", 1.37, 1.4, "", ""]
    assert [row["once_faster"] for row in rows[:2]] == [1.0, 1.0]
    assert [row["requests"] for row in rows[:2]] == [8, 1]
    stages = [str(row["measurement"]) for row in rows[6:]]
    assert len(stages) == 6 and stages[2] == "breakdown, 3 cached: first token"
    assert all(float(row["value"]) >= 0 for row in rows)


def test_a_copy_serves_its_own_place_only() -> None:
    desk = lazy.Service(TINY, 32, 12)

    def computed(prompt: lazy.PromptParts) -> list[str]:
        progress = desk.add(prompt, 1)
        desk.finish()
        return [document.source for document in progress.output().reuse.documents]

    assert computed(desk.copy_per_position([1, 2, 3])) == ["computed"] * 3
    assert computed(desk.copy_per_position([1, 3, 2])) == ["cached", "computed", "computed"]
    assert computed(desk.stored_once([1, 2, 3])) == ["computed"] * 3
    assert computed(desk.stored_once([3, 1, 2])) == ["cached"] * 3


TINY_RATE = rate.RateConfig(
    "tiny", "cpu", documents=4, document_tokens=32, per_request=2, question=8, output=3, summary=4,
    selectors=("question",), rates=(1.0, 1e6), arrivals=3, repetitions=1, hold=0.0,
    longest=0.0,
)  # fmt: skip


def test_rate_measures_every_arm_alone_and_at_rates() -> None:
    rows = list(rate.measure(TINY_RATE, ("rates",)))
    arms = ["full recompute", "prefix caching", "reuse", "question, ratio 0.15"]
    alone = [row for row in rows if row["measurement"] == "first token alone"]
    assert [row["arm"] for row in alone] == [*arms, "map-reduce", "map-rerank"]
    assert alone[0]["times_full"] == 1.0 and alone[3]["paper"] == "2.2 to 3.3"
    arriving = [row for row in rows if row["measurement"] == "first token"]
    assert {(row["arm"], row["rate"]) for row in arriving} >= {(arm, 1.0) for arm in arms}
    highest = [row for row in rows if row["measurement"] == "highest rate"]
    assert [row["arm"] for row in highest] == arms
    assert all(row["value"] in (0.0, 1.0, 1e6) for row in highest)


def test_a_rate_is_held_for_as_long_as_is_asked() -> None:
    config = replace(TINY_RATE, hold=1.5)
    assert [config.num_arrivals(each) for each in (1.0, 2.0, 8.0)] == [3, 3, 12]
    slow = replace(config, longest=4.0)
    assert [slow.num_arrivals(8.0, alone) for alone in (0.1, 0.25, 9.0)] == [12, 20, 32]


def test_rate_measures_other_numbers_and_lengths_of_documents_and_several_at_once() -> None:
    rows = list(rate.measure(replace(TINY_RATE, batches=(2,)), ("sizes",)))
    own = [row for row in rows if row["arm"] == "full recompute"]
    assert [(r["measurement"], r["per_request"], r["document_tokens"]) for r in own] == [
        ("first token alone", 2, 32), ("first token alone", 1, 32), ("first token alone", 4, 32),
        ("first token alone", 2, 16), ("first token alone", 2, 64),
        ("first token, 2 at once", 2, 32),
    ]  # fmt: skip
    assert all(float(row["value"]) > 0 for row in rows)


def test_arms_of_rate_find_in_the_cache_what_they_say() -> None:
    service = rate.Service(TINY_RATE)
    cached = {}
    for name, arm in rate.arms_of(service).items():
        rate.fill(service, arm, [2, 0])
        for _ in range(5 if arm.keeps_cache else 0):
            service.add(arm.make_prompt([2, 0]), 1, arm.fuse)
            service.finish()
        progress = service.add(arm.make_prompt([2, 0]), 1, arm.fuse)
        service.finish()
        reuse = progress.output().reuse
        cached[name] = reuse.text_tokens_cached + sum(
            32 for document in reuse.documents if document.source == "cached"
        )
    assert cached == {
        "full recompute": 0, "prefix caching": 32, "reuse": 64, "question, ratio 0.15": 64,
    }  # fmt: skip
