"""The training scripts, end to end on a CPU at toy size, and what their parts promise."""

import csv
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from looseleaf_lab.evals.world import TRAINING_SEEDS_START, WorldConfig, make_world, words
from training import curriculum
from training.data import FULL, KINDS, LEAD, TEXT, Packer, SampleWriter, Stage, draw_sample, pack
from training.evaluate import EvalPlan, eval_batches, exact_match
from training.export import export
from training.model import Llama, ModelConfig, Rope, dense_mask
from training.step import DeviceBatch, Stepper
from training.tokenizer import train_tokenizer, write_tokenizer
from training.train import TrainConfig, Trainer, load
from training.workers import sample_stream

CPU = torch.device("cpu")
TOY = ModelConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_qo_heads=2, num_kv_heads=1, head_dim=16
)
SMALL = Stage("small", documents=(2, 3), facts=(1, 2), fillers=(0, 1), questions=(2, 3))


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(train_tokenizer(num_worlds=300), folder)
    return folder


@pytest.fixture(scope="session")
def writer(tokenizer_folder: Path) -> SampleWriter:
    return SampleWriter(Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")))


def toy_run(tokenizer: Path, output: Path, stages_of: str, resume: Path | None = None) -> Trainer:
    config = TrainConfig(
        tokenizer, output, seconds=1e9, max_steps=4, rows=1, length=1_408, num_workers=0,
        stages_of=stages_of, resume=resume, examples=1, device="cpu", model=TOY,
    )  # fmt: skip
    trainer = Trainer(config)
    trainer.run()
    return trainer


def test_training_runs_from_the_tokenizer_to_a_checkpoint_that_transformers_reads(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    causal = toy_run(tokenizer_folder, tmp_path / "causal", "causal")
    block = toy_run(tokenizer_folder, tmp_path / "block", "block", resume=tmp_path / "causal")
    results = block.evaluate()
    assert {"lookup", "bridge", "chain3", "unanswerable"} <= set(results["independent chat"])
    assert json.loads((tmp_path / "block" / "accuracy.json").read_text()) == results
    with (tmp_path / "causal" / "training.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[-1]["step"] == "4" and int(rows[-1]["tokens"]) == causal.tokens > 0

    export(TOY, tmp_path / "block", tokenizer_folder, tmp_path / "checkpoint")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", dtype=torch.float32
    )
    tokens = torch.randint(7, TOY.vocab_size, (1, 40))
    rope = Rope.at(torch.arange(40), TOY)
    causal_mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    with torch.no_grad():
        states = block.model(tokens, rope, causal_mask)
        ours = states @ block.model.embed_tokens.weight.T
        assert (ours - theirs(tokens).logits).abs().max() < 1e-4


def test_the_chat_template_writes_what_the_model_was_trained_on(
    tokenizer_folder: Path, writer: SampleWriter, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    for file in tokenizer_folder.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who signs travel requests?"},
    ]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin|><|system|>Be brief.<|end|><|user|>Who signs travel requests?<|end|><|assistant|>"
    )
    sample = writer.write((), [], chat=True, system="Be brief.")
    ids = theirs(text, add_special_tokens=False).input_ids
    assert ids[: len(sample.tokens)] == sample.tokens


def test_an_inherited_value_is_the_label_where_a_neutral_word_stands(writer: SampleWriter) -> None:
    world = make_world(TRAINING_SEEDS_START, WorldConfig(hops=3))
    sample = writer.write(world.documents, [], chat=True)
    neutral = writer.encode(" " + words.NEUTRAL)[0]
    changed = [i for i, t in enumerate(sample.tokens) if t != sample.labels[i]]
    expected = [value for document in world.documents for _, value in document.inherited]
    assert [sample.labels[i] for i in changed] == [writer.encode(f" {v}")[0] for v in expected]
    assert all(sample.tokens[i] == neutral and sample.weight[i] == FULL for i in changed)
    alone = writer.write(world.documents, [], chat=True, independent=True)
    assert alone.tokens == sample.tokens == alone.labels


def test_packed_labels_are_the_next_tokens_and_answers_stay_apart(writer: SampleWriter) -> None:
    samples = [draw_sample(writer, seed, SMALL) for seed in range(4)]
    packer = Packer(rows=1, length=sum(len(sample.tokens) for sample in samples))
    assert all(packer.add(sample) for sample in samples)
    assert not packer.add(samples[0])
    batch = packer.batch()
    expected = [label for sample in samples for label in (*sample.labels[1:], 0)]
    assert batch.labels[0].tolist() == expected
    numbered = [number for number, kind in enumerate(batch.kinds) if kind >= 0]
    assert sorted(set(batch.answer[0].tolist())) == [0, *numbered]


def test_a_document_alone_reads_the_lead_and_itself(writer: SampleWriter) -> None:
    stage = Stage("small", (2, 3), (1, 2), (0, 1), (2, 3), independent=0.5)
    batch = DeviceBatch.of(pack(sample_stream(writer, 0, 1, stage), 1, 1_024), CPU)
    mask = dense_mask(batch.sample, batch.part)[0, 0]
    sample, part = batch.sample[0].tolist(), batch.part[0].tolist()
    for query in range(0, 1_024, 37):
        for key in range(0, 1_024, 11):
            past = sample[query] == sample[key] and key <= query
            own = part[key] in (part[query], LEAD) or part[query] == TEXT
            assert bool(mask[query, key]) == (past and own)


def test_every_held_out_example_is_measured(tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    plan = EvalPlan(examples=3, num_documents=5)
    batches = list(eval_batches(tokenizer, plan, (2, 1_408)))
    asked = [KINDS[kind] for batch in batches for kind in batch.kinds.tolist() if kind >= 0]
    assert len([kind for kind in asked if kind != "inherited"]) == 3 * 8
    model = Llama(TOY)
    stepper = Stepper(model, 2, 1_408, CPU)
    assert set(exact_match(stepper, tokenizer, plan, (2, 1_408))) >= {"lookup", "chain3"}


def test_saved_weights_lose_less_than_bf16_would(tokenizer_folder: Path, tmp_path: Path) -> None:
    trainer = toy_run(tokenizer_folder, tmp_path, "causal")
    again = Llama(TOY)
    load(again, tmp_path)
    for ours, theirs in zip(trainer.model.parameters(), again.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 2**-15 * ours.abs().max()


def test_a_stage_ends_when_it_is_mastered() -> None:
    mastery = curriculum.Mastery()
    assert mastery.reached(curriculum.INDUCTION, {"repeat": 0.9})
    assert not mastery.reached(curriculum.SHORT, {"repeat": 0.9})
    assert mastery.reached(curriculum.SHORT, {"lookup": 0.95, "bridge": 0.9, "inherited": 0.95})
