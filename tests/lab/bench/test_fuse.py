"""``bench fuse`` at toy size: every arm and place is measured, and documents come from there."""

from dataclasses import replace

import pytest
import torch

from looseleaf.engine.runner.runner import Runner
from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.fuse import Arm, FuseBench, _Bench, measure


@pytest.fixture
def config(tmp_path):
    return FuseBench(
        "tiny", torch.device("cpu"), tmp_path, documents=3, document_tokens=40, question=8,
        repetitions=1, stored=5, batches=2, selectors=("first", "random"),
    )  # fmt: skip


def test_every_arm_is_measured_in_every_place(config):
    rows = list(measure(config))
    assert len({tuple(row) for row in rows}) == 1
    first = [row for row in rows if row["measurement"] == "first token"]
    assert len(first) == 2 + 2 + 3 * 3
    launches = {(r["arm"], r["place"]): r for r in rows if r["measurement"] == "first launch"}
    # nobody waits for the launch of what only loads; any other is before its token
    assert set(launches) == {(row["arm"], row["place"]) for row in first if row["arm"] != "load"}
    for row in first:
        assert row["arm"] == "load" or launches[row["arm"], row["place"]]["ms"] < row["ms"]
    for row in rows:
        assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"]
    assert {row["arm"] for row in rows if row["batch"] == 1} == {"full", "prefix", "reuse"} | set(
        config.selectors
    )
    again = {row["arm"]: row["computed_again"] for row in first if row["place"] == "host"}
    # of three documents the first stands where it was encoded
    assert again["first"] == 2 * 16
    assert again["random"] == int(0.15 * 80)


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_documents_come_from_where_the_row_says(config, place):
    bench = _Bench.create(config)
    for _ in range(2):
        documents, question = bench.prompt()
        bench.prepare(place, documents)
        asked = bench.answer((*documents, question), config.policies()[Arm("random", 0.15)])
        assert 0 < asked.launch < asked.seconds
        assert asked.output is not None
        came = {d.tier if d.source == "loaded" else "device" for d in asked.output.reuse.documents}
        assert came == {place}
    bench.engine.close()


def test_the_engine_is_warm_before_it_computes_anything(config, monkeypatch):
    done, run = [], Runner.run

    def step(runner, *work):
        done.append("step")
        return run(runner, *work)

    monkeypatch.setattr(Runner, "warm_up", lambda runner: done.append("warm"))
    monkeypatch.setattr(Runner, "run", step)
    next(measure(config))
    assert done[0] == "warm"
    assert done.count("warm") == 1 < done.count("step")


def test_an_unknown_place_or_arm_is_refused(config):
    with pytest.raises(InvalidOption, match="device, host, disk"):
        replace(config, places=("moon",))
    with pytest.raises(InvalidOption, match="no arm for 'oracle'"):
        replace(config, selectors=("oracle",)).policies()
