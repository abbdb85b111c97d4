"""``bench generate``: tokens per second and time to first token, beside Transformers' ``generate``.

Both arms run the same checkpoint on the same prompts in the same process, in turn. Decode time is
counted from the first token, which all rows of a batch get in the same step, to the last.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looseleaf.llm.llm import LLM
from looseleaf.prompt.request import Document, Request
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.timing import Repeated, measure_in_turn

Parts = list[str | Document]


@dataclass(frozen=True)
class GenerateConfig:
    """What to measure.

    Decoding starts from ragged prompts of up to ``prompt_tokens``; the first token is that of a
    question behind five documents of ``document_tokens`` each.
    """

    model: Path
    name: str
    prompt_tokens: int
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
        slices = [self._slice(llm, n * num_tokens, num_tokens) for n in range(number)]
        return [Document(text, name=f"document {n + 1}") for n, text in enumerate(slices)]

    def private(self, llm: LLM, row: int, num_tokens: int) -> Parts:
        """A prompt of about ``num_tokens`` tokens that begins as no other row's does."""
        return [self._slice(llm, row * 997, num_tokens)]

    def _slice(self, llm: LLM, start: int, length: int) -> str:
        tokenizer = llm.engine.tokenizer
        ids = tokenizer.encode(self.text)
        ids *= -(-(start + length) // len(ids))
        return tokenizer.decode(ids[start : start + length])

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

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> "Moments":
        """Exactly ``new_tokens`` tokens for each prompt."""
        longest = max(map(len, prompts))
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        moments: list[float] = []

        def mark(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            moments.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        start = time.perf_counter()
        self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[mark],
        )
        return Moments(start, moments[0], moments[-1], (new_tokens - 1) * len(prompts))


class Moments(NamedTuple):
    """When a batch was handed in, when all its rows had their first token, and their last.

    ``decoded`` tokens came between the last two.
    """

    start: float
    first: float
    last: float
    decoded: int

    @property
    def rate(self) -> float:
        return self.decoded / (self.last - self.first)


def measure(
    config: GenerateConfig, material: Material, progress: Progress = SILENT
) -> Iterator[Row]:
    """Rows of the table as they are measured: decode at every batch size, with and without shared
    documents, then the time to the first token."""
    progress.stage(f"loading {config.name} twice")
    llm = LLM(config.model, dtype=config.dtype, max_num_batched_tokens=65536)
    dtype = llm.engine.runner.model.dtype
    peer = Peer(config.model, dtype)
    origin: Row = {"model": config.name, "dtype": str(dtype).removeprefix("torch.")}
    fifth = config.prompt_tokens // 5
    documents = material.documents(llm, fifth)
    lines = [(batch, kind) for batch in config.batches for kind in ("private text", "documents")]
    for batch, kind in progress.over([*lines, (1, "first token")], _line_name):
        # ragged: rows have three to five fifths of the longest prompt
        if kind == "private text":
            prompts = [material.private(llm, n, (5 - n % 3) * fifth) for n in range(batch)]
        elif kind == "documents":
            prompts = [material.prompt(documents[: 5 - n % 3], n) for n in range(batch)]
        else:
            yield origin | _first_token(llm, peer, material, config, progress)
            return
        label = _line_name((batch, kind))
        yield origin | _decode((llm, peer), prompts, config, label, progress)


def _line_name(line: tuple[int, str]) -> str:
    return line[1] if line[1] == "first token" else f"decode, batch {line[0]}, {line[1]}"


def _run(llm: LLM, prompts: list[Parts], new_tokens: int) -> Moments:
    """The prompts as one batch, tokenizing included."""
    start = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    engine = llm.engine
    added = [
        engine.add(Request(f"bench-{number}", engine.prompts.from_parts(prompt), params))
        for number, prompt in enumerate(prompts)
    ]
    while any(progress.metrics.first_token is None for progress in added):
        engine.step()
    first, begun = time.perf_counter(), engine.counters.output_tokens
    while engine.has_work:
        engine.step()
    return Moments(start, first, time.perf_counter(), engine.counters.output_tokens - begun)


def _decode(
    pair: tuple[LLM, Peer],
    prompts: list[Parts],
    config: GenerateConfig,
    label: str,
    progress: Progress,
) -> Row:
    llm, peer = pair
    ids = [[t for part in llm.engine.prompts.from_parts(p) for t in part.tokens] for p in prompts]
    long = config.new_tokens + 1

    def ours() -> float:
        llm.engine.store.evict_idle()
        return _run(llm, prompts, long).rate

    def theirs() -> float:
        return peer.generate(ids, long).rate

    arms = {"ours": ours, "theirs": theirs}
    rates = measure_in_turn(arms, config.repetitions, progress=progress)
    row = _row("tokens/s", rates["ours"], rates["theirs"], higher_is_better=True)
    return {"measurement": label, "longest_prompt": max(map(len, ids)), **row}


def _first_token(
    llm: LLM, peer: Peer, material: Material, config: GenerateConfig, progress: Progress
) -> Row:
    """Five cached documents in another order at every turn, against full prefill by the peer."""
    documents = material.documents(llm, config.document_tokens)
    orders = count()

    def shuffled() -> Parts:
        n = next(orders)
        turned = [*documents[n % 5 :], *documents[: n % 5]]
        return material.prompt(turned if n % 2 else turned[::-1], n)

    _run(llm, [material.prompt(documents, 0)], 1)
    ids = [t for part in llm.engine.prompts.from_parts(shuffled()) for t in part.tokens]

    def ours() -> float:
        moments = _run(llm, [shuffled()], 1)
        return moments.last - moments.start

    def theirs() -> float:
        moments = peer.generate([ids], 1)
        return moments.first - moments.start

    arms = {"ours": ours, "theirs": theirs}
    times = measure_in_turn(arms, config.repetitions, progress=progress)
    label = f"first token, 5 cached documents of {config.document_tokens}, new order"
    shown = {name: t.map(lambda s: s * 1e3) for name, t in times.items()}
    row = _row("ms", shown["ours"], shown["theirs"], higher_is_better=False)
    return {"measurement": label, "longest_prompt": len(ids), **row}


def _row(unit: str, ours: Repeated, theirs: Repeated, *, higher_is_better: bool) -> Row:
    ratio = ours.median / theirs.median
    return {
        "unit": unit,
        "looseleaf": ours.median,
        "looseleaf_low": ours.range[0],
        "looseleaf_high": ours.range[1],
        "transformers": theirs.median,
        "transformers_low": theirs.range[0],
        "transformers_high": theirs.range[1],
        "times_faster": ratio if higher_is_better else 1 / ratio,
    }
