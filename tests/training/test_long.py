"""Long contexts and roll-calls: how they are written, packed, masked and measured."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.attention.flex_attention import create_block_mask

from looseleaf.llm.load import reference_model
from looseleaf_lab.evals.world import (
    NO_ANSWER,
    TRAINING_SEEDS_START,
    Question,
    WorldConfig,
    make_roll_call,
    make_world,
)
from training import curriculum
from training.data import KINDS, LEAD, TEXT, Form, Sample, SampleWriter, pack
from training.evaluate import exam_sets
from training.long import draw_long
from training.model import ModelConfig, block_mask, visible
from training.step import DeviceBatch
from training.train import Clock, TrainConfig, Trainer
from training.workers import sample_stream

CPU = torch.device("cpu")
TOY = ModelConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_qo_heads=2, num_kv_heads=1, head_dim=16
)
STAGE = replace(curriculum.FAR, long_samples=2, long_tokens=(500, 900), until=0.5)


@pytest.fixture(scope="module")
def writer() -> SampleWriter:
    return SampleWriter(Tokenizer.from_file(str(reference_model() / "tokenizer.json")))


def decode(tokens: list[int]) -> str:
    text: str = Tokenizer.from_file(str(reference_model() / "tokenizer.json")).decode(tokens)
    return text


def asked(sample: Sample) -> list[str]:
    """The answers of a sample, read back from its tokens."""
    answers: dict[int, list[int]] = {}
    for token, number in zip(sample.tokens, sample.answer, strict=True):
        answers.setdefault(number, []).append(token)
    return [decode(tokens) for number, tokens in sorted(answers.items()) if number]


def test_a_roll_call_is_trained_on_as_it_is_asked_and_every_line_counts(
    writer: SampleWriter,
) -> None:
    call = make_roll_call(1 << 41, lines=12, num_documents=12)
    sample = writer.write((), [Question(call.question, call.answer, "roll-call")], chat=True)
    assert [KINDS[kind] for kind in sample.kinds] == ["roll-call"] * 12
    whole = writer.encode(call.answer)
    answer = [t for t, number in zip(sample.tokens, sample.answer, strict=True) if number]
    assert answer[:-1] == whole  # its lines one by one are tokens of the whole
    question = writer.encode(call.question)
    assert question == sample.tokens[2 : 2 + len(question)]
    lines = asked(sample)
    assert lines[0] == f"1. {call.lines[0]}" and lines[11].strip().startswith("12. ")


def test_turns_run_on_without_end_marks_but_for_the_first_and_the_last(
    writer: SampleWriter,
) -> None:
    questions = [Question(f"Who is {n}?", f"It is {n}.", "lookup") for n in ("one", "two", "three")]
    end = writer.encode("<|end|>")[0]
    apart = writer.write((), questions, chat=True)
    joined = writer.write((), questions, chat=True, form=Form(run_on=True))
    assert apart.tokens.count(end) == 6 and joined.tokens.count(end) == 2
    assert [t for t in apart.tokens if t != end] == [t for t in joined.tokens if t != end]


def test_long_samples_are_about_as_long_as_the_stage_says_and_densely_asked(
    writer: SampleWriter,
) -> None:
    samples = [draw_long(writer, seed, STAGE) for seed in range(40)]
    assert samples[7] == draw_long(writer, 7, STAGE)
    lengths = [len(sample.tokens) for sample in samples]
    assert min(lengths) > 350 and max(lengths) < 1_500
    kinds = {KINDS[kind] for sample in samples for kind in sample.kinds}
    assert {"needle", "lookup", "roll-call", "unanswerable"} <= kinds
    assert sum(len(sample.kinds) for sample in samples) > sum(lengths) / 200


def test_a_batch_holds_the_long_samples_that_its_stage_asks_for(writer: SampleWriter) -> None:
    stage = replace(STAGE, long_tokens=(3_000, 3_000), everyday=1.0)
    batch = pack(sample_stream(writer, 0, 1, stage), 2, 4_096)
    sizes = torch.as_tensor(batch.sample).unique(return_counts=True)[1]
    assert (sizes > 2_400).sum() == 2
    assert (batch.sample > 0).mean() > 0.9


def in_blocks(number: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    table = torch.zeros(which.shape, dtype=torch.bool)
    for line in [
        (row, 0, query) for row in range(which.shape[0]) for query in range(which.shape[2])
    ]:
        table[line][which[line][: number[line]].long()] = True
    return table


@pytest.mark.parametrize("independent", [0.0, 0.7])
def test_blocks_told_from_runs_are_those_that_the_rule_makes(
    writer: SampleWriter, independent: float
) -> None:
    stage = replace(STAGE, independent=independent)
    batch = DeviceBatch.of(pack(sample_stream(writer, 3, 1, stage), 2, 2_048), CPU)
    rule = visible(batch.sample, batch.part)
    ours = block_mask(batch.sample, batch.part, rule)
    theirs = create_block_mask(rule, 2, None, 2_048, 2_048, device="cpu")
    tables = []
    for mask in (ours, theirs):
        assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
        partly = in_blocks(mask.kv_num_blocks, mask.kv_indices)
        tables.append((partly, in_blocks(mask.full_kv_num_blocks, mask.full_kv_indices)))
    (partly, whole), (their_partly, their_whole) = tables
    assert not (whole & ~their_whole).any()
    assert not ((their_partly | their_whole) & ~(partly | whole)).any()
    if not independent:
        assert (partly == their_partly).all() and (whole == their_whole).all()
    tables_of_keys = (ours.kv_indices, ours.q_indices, ours.full_kv_indices, ours.full_q_indices)
    assert all(table is not None and table.is_contiguous() for table in tables_of_keys)
    # and read from the keys' side
    assert ours.q_num_blocks is not None and ours.q_indices is not None
    assert (in_blocks(ours.q_num_blocks, ours.q_indices) == partly.mT).all()


def test_stages_of_a_schedule_end_by_its_share_and_a_later_part_begins_in_its_own(
    tmp_path: Path,
) -> None:
    mastery = curriculum.Mastery()
    assert not mastery.reached(STAGE, {"lookup": 1.0}, done=0.4)
    assert mastery.reached(STAGE, {}, done=0.5)
    config = TrainConfig(
        reference_model(), tmp_path, num_workers=0, rows=1, length=1_408, device="cpu",
        model=TOY, stages_of="lengthen", from_share=0.3, to_share=0.75,
    )  # fmt: skip
    assert Clock(config).done == 0.3
    trainer = Trainer(config)
    trainer.feed.close()
    assert config.stages[trainer.stage].name == "far"


def test_every_task_is_examined(writer: SampleWriter) -> None:
    sets = exam_sets(str(reference_model() / "tokenizer.json"), 1, (1, 8_192))
    kinds = {
        name: {KINDS[kind] for batch in batches for kind in batch.kinds.tolist() if kind >= 0}
        for name, batches in sets.items()
    }
    assert {"lookup", "bridge", "chain4", "look-alike", "unanswerable"} <= kinds[""] & kinds[
        "alone"
    ]
    assert kinds["40"] == {"roll-call"}
    assert kinds["4096"] == {"needle"} and "8192" not in kinds


def test_fused_documents_read_themselves_and_what_hands_a_value_on_reads_all(
    writer: SampleWriter,
) -> None:
    world = make_world(TRAINING_SEEDS_START, WorldConfig(hops=3))
    sample = writer.write(world.documents, [], chat=True, form=Form(fused=True))
    places = [i for i, t in enumerate(sample.tokens) if t != sample.labels[i]]
    assert places and all(sample.part[place - 1] == TEXT for place in places)
    inside = [part for part in sample.part if part not in (TEXT, LEAD)]
    assert len(inside) > 0.9 * len(sample.part) and set(inside) == set(range(1, 7))


def test_the_end_mark_of_a_question_foretells_the_last_word_of_an_answer_that_there_is(
    writer: SampleWriter,
) -> None:
    questions = [
        Question("Who runs it?", "The head of it is Mira Tolland.", "lookup"),
        Question("Who else?", NO_ANSWER, "unanswerable"),
    ]
    sample = writer.write((), questions, chat=True, form=Form(foretold=True))
    assert sample.tokens == writer.write((), questions, chat=True).tokens
    (place,) = [i for i, t in enumerate(sample.tokens) if t != sample.labels[i]]
    end, assistant = (writer.encode(mark)[0] for mark in ("<|end|>", "<|assistant|>"))
    assert sample.tokens[place - 1 : place + 1] == [end, assistant]
    assert sample.labels[place] == writer.encode(" Tolland")[0]
    assert KINDS[sample.kinds[0]] == "foretold"
