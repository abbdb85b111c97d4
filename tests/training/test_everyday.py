"""Everyday notes: what is asked of them, and what is kept out of them. The probe and its judge."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from looseleaf.llm.load import reference_model
from looseleaf_lab.evals.world import NO_ANSWER
from looseleaf_lab.evals.world.names import name_pool
from training.data import KINDS, TEXT, SampleWriter, draw_sample
from training.everyday import Note, compose
from training.everyday.compose import Composer, Fact
from training.everyday.families import ATTRIBUTE, PLAIN
from training.model import Llama, ModelConfig
from training.probe import DECLINED, PROBES, RIGHT, WRONG, Probe, judge, load_probes
from training.train import load


@pytest.fixture(scope="module")
def notes() -> list[Note]:
    return [compose(random.Random(seed)) for seed in range(300)]


def test_a_seed_always_gives_the_same_notes() -> None:
    assert compose(random.Random(3)) == compose(random.Random(3))
    assert compose(random.Random(3)) != compose(random.Random(4))


def test_an_answer_ends_with_words_of_its_notes(notes: list[Note]) -> None:
    for note in notes:
        read = " ".join(note.texts).lower()
        for _, answer, said in note.asked:
            if said:
                assert answer.rstrip(".").split()[-1].strip('"').lower() in read


def test_what_the_notes_do_not_say_is_answered_by_saying_so(notes: list[Note]) -> None:
    unsaid = [answer for note in notes for _, answer, said in note.asked if not said]
    answered = [answer for note in notes for _, answer, said in note.asked if said]
    assert set(unsaid) == {NO_ANSWER} and NO_ANSWER not in answered
    assert 0.15 < len(unsaid) / (len(unsaid) + len(answered)) < 0.45


def test_no_held_out_name_stands_in_a_note(notes: list[Note]) -> None:
    held_out = set(name_pool(True))
    for note in notes:
        spoken = [*note.texts, *(text for asked in note.asked for text in asked[:2])]
        assert not held_out & {word.strip('.,?!:;()"*-') for t in spoken for word in t.split()}


def test_a_question_is_ambiguous_if_two_facts_fit_what_it_names() -> None:
    composer = Composer(random.Random(0))
    of_shed = Fact(ATTRIBUTE, {"r": {"r": ("code",)}, "s": {"s": ("the shed",)}}, {"o": ("1",)})
    of_gate = Fact(ATTRIBUTE, {**of_shed.slots, "s": {"s": ("the gate",)}}, {"o": ("2",)})
    alone = Fact(PLAIN, {"r": {"r": ("code",)}}, {"o": ("3",)})
    assert not of_shed.agrees(of_gate, {"r", "s"})
    assert of_shed.agrees(of_gate, {"r"})
    assert alone.agrees(of_shed, {"r"})  # "the code": of the shed, for all we know
    composer.facts = [of_shed, alone]
    asked = [composer.question(unsaid=False) for _ in range(50)]
    assert not any(asked)


def test_a_stage_mixes_notes_and_worlds() -> None:
    from training.curriculum import NOTES

    writer = SampleWriter(Tokenizer.from_file(str(reference_model("block") / "tokenizer.json")))
    kinds = set()
    parts = set()
    for seed in range(40):
        sample = draw_sample(writer, seed, NOTES[0])
        kinds |= {KINDS[kind] for kind in sample.kinds}
        parts |= set(sample.part)
    assert {"note", "note_unsaid", "lookup", "bridge"} <= kinds
    assert {1, TEXT} <= parts  # some documents are read on their own


def test_training_can_resume_from_a_checkpoint_of_the_package(tmp_path: Path) -> None:
    model = Llama(ModelConfig())
    before = model.embed_tokens.weight.detach().clone()
    load(model, reference_model("block"))
    assert (model.embed_tokens.weight != before).any()


@pytest.mark.parametrize("file", PROBES, ids=lambda file: file.stem)
def test_every_answer_of_the_probe_stands_in_its_notes(file: Path) -> None:
    probes = load_probes(file)
    assert len(probes) >= 40 and sum(not probe.answers for probe in probes) >= 10
    for probe in probes:
        read = " ".join(" ".join(probe.notes).lower().replace("*", "").split())
        assert not probe.answers or any(answer.lower() in read for answer in probe.answers)


def test_the_judge_wants_the_value_whole_and_last() -> None:
    said = Probe(("The password is bluebird.",), "What is the password?", ("bluebird",))
    assert judge(said, "The password is bluebird.") == RIGHT
    assert judge(said, "The password isbird.") == WRONG
    assert judge(said, "The password is bluebird house.") == WRONG
    assert judge(said, NO_ANSWER) == DECLINED
    unsaid = Probe(said.notes, "Who is the cook?", ())
    assert judge(unsaid, NO_ANSWER) == RIGHT
    assert judge(unsaid, "The cook is bluebird.") == WRONG
