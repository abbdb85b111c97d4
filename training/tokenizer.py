"""Trains the byte-level BPE tokenizer on text of the training worlds and writes its files.

python -m training.tokenizer OUTPUT_FOLDER
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from looseleaf_lab.evals.world import (
    TRAINING_SEEDS_START,
    World,
    WorldConfig,
    ask,
    make_world,
    words,
)

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
SYSTEM, USER, ASSISTANT, DOCUMENT = "<|system|>", "<|user|>", "<|assistant|>", "<|document|>"
SPECIAL_TOKENS = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT, DOCUMENT)
VOCAB_SIZE = 2_048

DOCUMENT_TEMPLATE = f"{DOCUMENT}{{text}}{END}"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# a word takes its space along, digits stand alone: numbers of any length are spelled one way
_WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def world_text(world: World, rng: random.Random) -> Iterator[str]:
    """All text of a world that the model may meet."""
    for document in world.documents:
        yield document.text
    for task in ("lookup", "bridge", "chain", "unanswerable"):
        question = ask(world, task, rng)
        if question is not None:
            yield question.text
            yield question.answer


def training_text(num_worlds: int) -> Iterator[str]:
    """Text of worlds that training also draws from, foreign prose included."""
    rng = random.Random(0)
    config = WorldConfig(foreign=0.15, shown=0.25)
    for number in range(num_worlds):
        yield from world_text(make_world(TRAINING_SEEDS_START + number, config), rng)
    # every value that a chain hands on must become one token
    yield from [" ".join(("", *words.MARKS, words.NEUTRAL, "stays"))] * (num_worlds * 3)


def train_tokenizer(num_worlds: int, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(num_worlds), trainer)
    for word in (*words.MARKS, words.NEUTRAL):
        if len(tokenizer.encode(" " + word).ids) != 1:
            raise ValueError(f"' {word}' is not one token: train on more worlds")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int = 4_096) -> None:
    """tokenizer.json and tokenizer_config.json, as Transformers and the engine read them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT, DOCUMENT],
        "chat_template": CHAT_TEMPLATE,
        "document_template": DOCUMENT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--worlds", type=int, default=4_000)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    arguments = parser.parse_args()
    write_tokenizer(train_tokenizer(arguments.worlds, arguments.vocab_size), arguments.output)


if __name__ == "__main__":
    main()
