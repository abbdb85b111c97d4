"""The attention benchmark times what it says, and nothing that is wrong."""

from dataclasses import replace

import pytest
import torch

from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf_lab.bench.attention import AttentionConfig, Bench, cases, measure, ratios
from looseleaf_lab.bench.attention_cases import (
    AttentionShape,
    after_documents,
    causal,
    document_subsets,
    shared,
)
from looseleaf_lab.bench.latent_arms import EXPANDED, MAPPED
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.errors import BenchmarkRefused

SMALL = AttentionConfig(
    AttentionShape(4, 2, 32, layers=1, dtype=torch.float32),
    longest=128,
    rows=4,
    repetitions=1,
    device="cpu",
)


def test_work_that_is_counted_is_what_rows_see_and_pages_hold():
    shape = SMALL.shape
    prompt = causal(shape, 40)
    assert prompt.pairs() == 40 * 41 // 2
    assert prompt.distinct_keys(16) == 48
    relay = shared(shape, 4, 64, spread=3)
    assert relay.pairs() == 4 * 65
    assert relay.distinct_keys(16) == 64 + 4 * 16
    assert {row.settled[0].offset for row in relay.rows} == {0, 3, 6, 9}
    question = after_documents(shape, 5, 2, 32)
    assert question.pairs() == 5 * 64 + 15
    few = document_subsets(shape, 7, 3, 5, 40, tail=20)
    assert few.pairs() == 7 * (3 * 40 + 20)
    assert few.distinct_keys(16) == 5 * 48 + 7 * 32
    assert {tuple(span.offset for span in row.settled) for row in few.rows} == {(0, 40, 80)}
    assert len({tuple(map(id, (span.pages for span in row.settled))) for row in few.rows}) > 1


def test_a_question_behind_long_documents_is_read_as_the_engine_reads_it():
    question = after_documents(SMALL.shape, 8, 3, 4096)
    bench = Bench(SMALL, question.num_pages, question.longest)
    assert bench.planner.by_work_list(question.chunks)
    listed = bench.plan(question)
    bench.passes = True
    in_parts = bench.plan(question)
    assert listed.spans is None and listed.work is not None
    assert in_parts.work is None and in_parts.spans is not None
    q = bench.query(question)
    state, other = (bench.layer(q, plan, 0, bench.rotation) for plan in (listed, in_parts))
    torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-5)


def test_every_case_is_measured_with_its_share_of_the_roofline():
    rows = list(measure(SMALL))
    names = {case.name for case in cases(SMALL)}
    subset = [case.name for case in cases(replace(SMALL, only=("ragged", "causal")))]
    assert len(subset) == 3
    assert {*subset} < names
    assert {row["measurement"] for row in rows} == names
    assert all(row["share_of_roofline"] > 0 and row["low"] <= row["median"] for row in rows)
    assert all(row["error_share_of_budget"] <= 1 for row in rows)
    assert len(list(ratios(rows))) == len(names)


def test_latent_keys_are_counted_and_read_once():
    shape = AttentionShape.of(model_shape("tiny-latent"), layers=1)
    assert (shape.bytes_per_key, shape.flops_per_pair) == (32 * 4, 2 * 4 * (32 + 24))
    rows = list(measure(replace(SMALL, shape=shape, only=("behind 2 shared", "128 tokens"))))
    assert "ungrouped" in {row["arm"] for row in rows}
    arms = {row["arm"]: row["flops"] for row in rows if "128 tokens" in str(row["measurement"])}
    pairs, maps = 128 * 129 // 2, 128 * 24 * (8 + 12)
    assert arms == {
        "looseleaf": 8 * pairs * (32 + 24),
        MAPPED: 8 * (pairs * (32 + 24) + maps),
        EXPANDED: 8 * (pairs * (16 + 12) + maps),
    }
    assert all(row["error_share_of_budget"] <= 1 for row in rows)


def test_a_wrong_answer_is_not_timed(monkeypatch):
    wrong = ReadSpan((0,), 3, 1, 0)

    def forgetful(rows):
        return [DecodeRow(row.position, (), wrong) for row in rows]

    case = shared(SMALL.shape, 4, 64)
    honest = "looseleaf.attention.plan.planner.Planner.host_work"
    from looseleaf.attention.plan.planner import Planner

    host_work = Planner.host_work

    def broken(self, rows, groups, chunks=(), **how):
        rows = forgetful(rows)
        return host_work(self, rows, self.group(rows, grouping=False), chunks, **how)

    monkeypatch.setattr(honest, broken)
    monkeypatch.setattr("looseleaf_lab.bench.attention.cases", lambda config: [case])
    with pytest.raises(BenchmarkRefused, match="times what rounding explains"):
        list(measure(SMALL))
