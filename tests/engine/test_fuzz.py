"""Requests drawn at random answer as each alone does: a short form of `tools.fuzz`."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from looseleaf.engine.admission import Admission
from looseleaf.engine.progress import OutputProgress
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.engine.runner.step_sampler import Draw, OnFault
from looseleaf.engine.runner.step_sampler import Drawing as EngineDrawing
from looseleaf.engine.scheduler import Scheduler
from looseleaf.engine.sequence import Sequence
from looseleaf.prompt.request import TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf.tiers import RemoteTier, TierFault
from looseleaf.tiers.stores.files import RecordHeader
from tests.tiers.records import content, key, put, read
from tests.tiers.redis_server import RedisServer, find_redis
from tools.fuzz import Fuzz, parsed
from tools.fuzz_answers import differs
from tools.fuzz_drawing import Ask, Drawing, Kind
from tools.fuzz_models import gpu_model
from tools.fuzz_redis import DAMAGES, _mix
from tools.fuzz_trouble import Interrupted, Trouble, damage


def fuzz(seed: int, rounds: int) -> Fuzz:
    return Fuzz(parsed([f"--seed={seed}", f"--rounds={rounds}"]))


def test_mixes_answer_as_each_request_alone() -> None:
    run = fuzz(seed=11, rounds=6)
    assert run() == 0, run.found
    assert run.engines == 6 and run.asked > 20


def test_the_same_seed_draws_the_same() -> None:
    def drawn(seed: int) -> list[str]:
        drawing = Drawing(seed)
        return [f"{drawing.kind()} {drawing.ask()}" for _ in range(20)]

    assert drawn(3) == drawn(3) != drawn(4)


def fuzz_of(kind: Kind, seed: int, monkeypatch: pytest.MonkeyPatch) -> Fuzz:
    """One engine of that kind, no hosted documents beside."""
    monkeypatch.setattr(Drawing, "kind", lambda self: kind)
    return fuzz(seed, rounds=1)


TIGHT = Kind(pages=20, tight=True)
REMOTE = Kind(pages=140, tiers="r")


def test_small_pools_preempt_and_answers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    run = fuzz_of(TIGHT, 3, monkeypatch)
    assert run() == 0, run.found
    assert run.preempted > 3


def test_a_fault_of_preempted_outputs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def forgetful(self: Scheduler, sequence: Sequence) -> None:
        # the token that is to be computed again is another one
        sequence.tail.tokens[-1] = (sequence.tail.tokens[-1] + 1) % 400
        preempt(self, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", forgetful)
    run = fuzz_of(TIGHT, 3, monkeypatch)
    assert run() == 1 and run.found


def test_damaged_values_of_redis_are_met_and_answers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    find_redis()
    run = fuzz_of(REMOTE, 4, monkeypatch)
    assert run() == 0, run.found
    assert run.redis_met > 0 and run.redis_damaged >= run.redis_met


def test_values_of_redis_that_nobody_checks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    find_redis()
    monkeypatch.setattr(RecordHeader, "check_layer", lambda *about: None)
    monkeypatch.setattr("tools.fuzz_redis.DAMAGES", (_mix,))
    run = fuzz_of(REMOTE, 8, monkeypatch)
    assert run() == 1 and run.found


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_each_damage_of_redis_is_found_out_or_gone(damage: Any, redis_server: RedisServer) -> None:
    import redis

    client, tier = redis.Redis(port=redis_server.port), RemoteTier(redis_server.url)
    name, other = (f"looseleaf:1:segment:{key(n).hex()}".encode() for n in (1, 2))
    for seed in range(8):
        for number in (1, 2):
            tier.delete([key(number)])
            put(tier, number)
        damage(client, name, other, random.Random(seed))
        with pytest.raises(TierFault) as caught:
            if read(tier, 1) is None or torch.equal(read(tier, 1), content(1)):
                raise TierFault("missing", "a field was taken for itself")
        assert caught.value.kind in ("damaged", "missing")
        if damage is not _mix:
            assert read(tier, 1) is None and put(tier, 1)
    client.close()
    tier.close()


def test_a_fault_of_mixes_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = EngineDrawing.draw

    def swapped(
        self: EngineDrawing,
        outputs: list[OutputProgress],
        logits: Tensor,
        on_fault: OnFault,
        plan: str,
    ) -> list[Draw]:
        # right for whoever is alone
        return draw(self, outputs, logits.roll(1, 0), on_fault, plan)

    monkeypatch.setattr(EngineDrawing, "draw", swapped)
    run = fuzz(seed=11, rounds=3)
    assert run() == 1 and run.found


def test_in_sixteen_bits_some_may_choose_otherwise_and_not_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = fuzz(seed=11, rounds=1)
    run.model = gpu_model(2, torch.device("cpu"))
    monkeypatch.setattr("tools.fuzz.chooses", lambda policies: True)
    monkeypatch.setattr("tools.fuzz.differs", lambda *answers, **how: "another")
    assert run() == 1
    assert run.found == [f"{run.otherwise} of {run.chose} chose otherwise"]


def test_what_an_interrupt_leaves_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release, lost = Admission.release, list[str]()

    def forgetful(self: Admission, sequence: Sequence) -> Any:
        interrupted = isinstance(sys.exception(), Interrupted)
        if interrupted and not lost and sequence.documents:
            # one reader more than those who give back
            for segment in self.store.segments():
                if segment.references and segment.ready:
                    lost.append(str(self.store.acquire(segment)))
        return release(self, sequence)

    monkeypatch.setattr(Admission, "release", forgetful)
    run = fuzz_of(Kind(tiers="hd", trouble="i"), 3, monkeypatch)
    run()
    assert lost and any("held by nobody" in error for error in run.found)


def test_interrupts_come_while_trouble_is_entered_once_each_and_answers_stay(
    tmp_path: Path,
) -> None:
    run = fuzz(seed=3, rounds=1)
    run.folder = str(tmp_path)
    engine = run.engine(Kind(tiers="hd", trouble="si"))
    trouble, came = Trouble(engine, "si", 1), 0
    question = TextPart(run.drawing.tokens(20))
    ask = Ask((*run.drawing.documents, question), SamplingParams(temperature=0, logprobs=4), {}, "")
    for _ in range(8):
        progress = run.add(engine, ask)
        try:
            with trouble:
                while engine.has_work:
                    engine.step()
        except Interrupted:
            came += 1
            engine.abort(progress.request.request_id)
        engine.check()
    assert 0 < came <= 8
    progress = run.add(engine, ask)
    while engine.has_work:
        engine.step()
    right = run.answer(ask, fp8=False)
    assert isinstance(right, RequestOutput)
    assert differs(progress.output(), right) is None
    engine.close()


def test_short_prompts_masses_and_every_trouble_are_drawn() -> None:
    drawing = Drawing(1)
    asks = [drawing.ask() for _ in range(400)]
    short = [a for a in asks if sum(len(part.tokens) for part in a.parts) <= 5]
    masses = [a for a in asks if (s := a.policies.get("select")) and s.mass is not None]
    assert short and masses and any(ask in masses for ask in short)
    kinds = [drawing.kind() for _ in range(200)]
    assert {letter for kind in kinds for letter in kind.trouble} == set("sfi")
    assert {letter for kind in kinds for letter in kind.tiers} == set("hdr")
    assert any(kind.tight for kind in kinds)
    assert not any(set(kind.trouble) & set("sf") and not kind.tiers for kind in kinds)


def test_a_damaged_file_is_another_or_gone(tmp_path: Path) -> None:
    path, content, seen = tmp_path / "file", bytes(range(200)), set[str]()
    for seed in range(20):
        path.write_bytes(content)
        damage(path, random.Random(seed))
        remainder = path.read_bytes() if path.exists() else None
        assert remainder != content
        seen.add(
            "gone" if remainder is None else "cut" if len(remainder) < len(content) else "flipped"
        )
    assert seen == {"gone", "cut", "flipped"}
