"""``bench generate``: tokens per second and time to first token, beside Transformers' ``generate``.

Both arms run the same checkpoint on the same prompts in the same process, in turn. Decode time is
the difference between answers of ``new_tokens + 1`` tokens and of one, so prefill cancels out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from looseleaf.bench.timing import Timing, time_in_turn
from looseleaf.engine.llm import LLM
from looseleaf.engine.request import Document
from looseleaf.sampling_params import SamplingParams

Parts = list[str | Document]


@dataclass(frozen=True)
class GenerateConfig:
    """What to measure. ``document_tokens`` is the length of each of five documents of the
    prompts.
    """

    model: Path
    name: str
    document_tokens: int
    batches: tuple[int, ...] = (1, 16)
    new_tokens: int = 32
    repetitions: int = 5
    dtype: str = "auto"


@dataclass(frozen=True)
class Material:
    """What prompts are made of: text to fill documents with, and questions, used in turn."""

    text: str
    questions: tuple[str, ...]

    def documents(self, llm: LLM, num_tokens: int, number: int = 5) -> list[Document]:
        """``number`` different documents of about ``num_tokens`` tokens each."""
        tokenizer = llm.engine.tokenizer
        ids = tokenizer.encode(self.text)
        if len(ids) < number * num_tokens:
            ids *= -(-number * num_tokens // len(ids))
        slices = [ids[n * num_tokens : (n + 1) * num_tokens] for n in range(number)]
        return [
            Document(tokenizer.decode(part), name=f"document {n + 1}")
            for n, part in enumerate(slices)
        ]

    def prompt(self, documents: Sequence[Document], number: int) -> Parts:
        """Documents, then question ``number``."""
        return [*documents, self.questions[number % len(self.questions)]]


class Peer:
    """Transformers' ``generate`` on the same checkpoint, greedy, left-padded where lengths
    differ.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Exactly ``new_tokens`` tokens for each prompt."""
        longest = max(map(len, prompts))
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        made: Any = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        answers: list[list[int]] = made[:, longest:].tolist()
        return answers


def measure(config: GenerateConfig, material: Material) -> list[dict[str, str | int | float]]:
    """Rows of the table: decode at every batch size, with and without shared documents, then
    TTFT.
    """
    llm = LLM(config.model, dtype=config.dtype, max_num_batched_tokens=4096)
    peer = Peer(config.model, llm.engine.runner.model.dtype)
    documents = material.documents(llm, config.document_tokens)
    rows = []
    for batch in config.batches:
        # ragged: rows leave out up to half of the documents
        shared = [material.prompt(documents[: 5 - n % 3], n) for n in range(batch)]
        text = [_as_text(prompt) for prompt in shared]
        rows.append(_decode(llm, peer, text, config, f"decode, batch {batch}, text"))
        if batch > 1:
            label = f"decode, batch {batch}, shared documents"
            rows.append(_decode(llm, peer, shared, config, label))
    rows.append(_first_token(llm, peer, material, config))
    origin = {
        "model": config.name,
        "dtype": str(llm.engine.runner.model.dtype).removeprefix("torch."),
    }
    return [{**origin, **row} for row in rows]


def _as_text(prompt: Parts) -> Parts:
    return [Document(p.text, context="prompt") if isinstance(p, Document) else p for p in prompt]


def _run(llm: LLM, prompts: list[Parts], new_tokens: int, *, cold: bool) -> list[Any]:
    if cold:
        llm.engine.store.evict_idle()
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    return list(llm.generate(prompts, params))


def _decode(
    llm: LLM, peer: Peer, prompts: list[Parts], config: GenerateConfig, label: str
) -> dict[str, str | int | float]:
    ids = [list(o.prompt_token_ids) for o in _run(llm, prompts, 1, cold=True)]
    long = config.new_tokens + 1
    times = time_in_turn(
        {
            "ours 1": lambda: _run(llm, prompts, 1, cold=True),
            "peer 1": lambda: peer.generate(ids, 1),
            "ours n": lambda: _run(llm, prompts, long, cold=True),
            "peer n": lambda: peer.generate(ids, long),
        },
        config.repetitions,
    )
    tokens = config.new_tokens * len(prompts)
    ours = [
        tokens / (n - one)
        for n, one in zip(times["ours n"].seconds, times["ours 1"].seconds, strict=True)
    ]
    theirs = [
        tokens / (n - one)
        for n, one in zip(times["peer n"].seconds, times["peer 1"].seconds, strict=True)
    ]
    return _row(
        label, "tokens/s", Timing(tuple(ours)), Timing(tuple(theirs)), higher_is_better=True
    )


def _first_token(
    llm: LLM, peer: Peer, material: Material, config: GenerateConfig
) -> dict[str, str | int | float]:
    """Five cached documents in another order at every turn, against full prefill by the peer."""
    documents = material.documents(llm, config.document_tokens)
    orders = count()

    def shuffled() -> list[Parts]:
        n = next(orders)
        turned = [*documents[n % 5 :], *documents[: n % 5]]
        return [material.prompt(turned if n % 2 else turned[::-1], n)]

    _run(llm, [material.prompt(documents, 0)], 1, cold=True)
    ids = [list(o.prompt_token_ids) for o in _run(llm, shuffled(), 1, cold=False)]
    times = time_in_turn(
        {
            "ours": lambda: _run(llm, shuffled(), 1, cold=False),
            "peer": lambda: peer.generate(ids, 1),
        },
        config.repetitions,
    )
    label = f"first token, 5 cached documents of {config.document_tokens}, new order"
    scaled = {name: Timing(tuple(s * 1e3 for s in t.seconds)) for name, t in times.items()}
    return _row(label, "ms", scaled["ours"], scaled["peer"], higher_is_better=False)


def _row(
    label: str, unit: str, ours: Timing, theirs: Timing, *, higher_is_better: bool
) -> dict[str, str | int | float]:
    ratio = ours.median / theirs.median
    return {
        "measurement": label,
        "unit": unit,
        "looseleaf": ours.median,
        "looseleaf_low": ours.range[0],
        "looseleaf_high": ours.range[1],
        "transformers": theirs.median,
        "transformers_low": theirs.range[0],
        "transformers_high": theirs.range[1],
        "times_faster": ratio if higher_is_better else 1 / ratio,
    }
