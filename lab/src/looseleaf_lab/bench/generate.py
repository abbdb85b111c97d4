"""``bench generate``: tokens per second and time to first token, against Transformers'
``generate``.

Both arms run the same checkpoint on the same prompts in the same process, alternating. Decode time
runs from the first token, which all rows of a batch get in the same step, to the last.
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
from looseleaf_lab.bench.timing import Samples, measure_in_turn

Parts = list[str | Document]


@dataclass(frozen=True)
class GenerateConfig:
    """Checkpoint, lengths and batches.

    Decoding starts from ragged prompts of up to ``prompt_tokens``. The first token is that of a
    question after five documents of ``document_tokens`` each.
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
    """The text of documents, and questions, used cyclically."""

    text: str
    questions: tuple[str, ...]

    def documents(self, llm: LLM, num_tokens: int, number: int = 5) -> list[Document]:
        """``number`` different documents of about ``num_tokens`` tokens each."""
        slices = [self._slice(llm, n * num_tokens, num_tokens) for n in range(number)]
        return [Document(text, name=f"document {n + 1}") for n, text in enumerate(slices)]

    def private(self, llm: LLM, row: int, num_tokens: int) -> Parts:
        """A prompt of about ``num_tokens`` tokens without a common prefix with other rows."""
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
    """Transformers' ``generate`` on the same checkpoint: greedy, left-padded for ragged batches."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> "BatchTimes":
        """Exactly ``new_tokens`` tokens for each prompt."""
        longest = max(map(len, prompts))
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        times: list[float] = []

        def mark(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            times.append(time.perf_counter())
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
        return BatchTimes(start, times[0], times[-1], (new_tokens - 1) * len(prompts))


class BatchTimes(NamedTuple):
    """Clock times of a batch: its start, the first token of all rows, and their last token.

    ``decoded`` is the number of tokens between the last two.
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
    """Rows as they are measured: decode at every batch size, with and without shared documents,
    then the time to first token."""
    progress.stage(f"loading {config.name} twice")
    llm = LLM(config.model, dtype=config.dtype, max_num_batched_tokens=65536)
    dtype = llm.engine.runner.model.dtype
    peer = Peer(config.model, dtype)
    origin: Row = {"model": config.name, "dtype": str(dtype).removeprefix("torch.")}
    fifth = config.prompt_tokens // 5
    documents = material.documents(llm, fifth)
    lines = [(batch, kind) for batch in config.batches for kind in ("private text", "documents")]
    for batch, kind in progress.over([*lines, (1, "first token")], _line_name):
        # ragged: rows have 3/5 to 5/5 of the longest prompt
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


def _run(llm: LLM, prompts: list[Parts], new_tokens: int) -> BatchTimes:
    """Run the prompts as one batch, including tokenization."""
    start = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    engine = llm.engine
    submitted = [
        engine.add(Request(f"bench-{number}", engine.prompts.from_parts(prompt), params))
        for number, prompt in enumerate(prompts)
    ]
    while any(progress.metrics.first_token is None for progress in submitted):
        engine.step()
    first, tokens_before = time.perf_counter(), engine.counters.output_tokens
    while engine.has_work:
        engine.step()
    return BatchTimes(
        start, first, time.perf_counter(), engine.counters.output_tokens - tokens_before
    )


def _decode(
    pair: tuple[LLM, Peer],
    prompts: list[Parts],
    config: GenerateConfig,
    label: str,
    progress: Progress,
) -> Row:
    llm, peer = pair
    ids = [[t for part in llm.engine.prompts.from_parts(p) for t in part.tokens] for p in prompts]
    num_tokens = config.new_tokens + 1

    def ours() -> float:
        llm.engine.store.evict_idle()
        return _run(llm, prompts, num_tokens).rate

    def theirs() -> float:
        return peer.generate(ids, num_tokens).rate

    arms = {"ours": ours, "theirs": theirs}
    rates = measure_in_turn(arms, config.repetitions, progress=progress)
    row = _row("tokens/s", rates["ours"], rates["theirs"], higher_is_better=True)
    return {"measurement": label, "longest_prompt": max(map(len, ids)), **row}


def _first_token(
    llm: LLM, peer: Peer, material: Material, config: GenerateConfig, progress: Progress
) -> Row:
    """Five cached documents in a new order per run, against the peer's full prefill."""
    documents = material.documents(llm, config.document_tokens)
    orders = count()

    def shuffled() -> Parts:
        n = next(orders)
        rotated = [*documents[n % 5 :], *documents[: n % 5]]
        return material.prompt(rotated if n % 2 else rotated[::-1], n)

    _run(llm, [material.prompt(documents, 0)], 1)
    ids = [t for part in llm.engine.prompts.from_parts(shuffled()) for t in part.tokens]

    def ours() -> float:
        batch_times = _run(llm, [shuffled()], 1)
        return batch_times.last - batch_times.start

    def theirs() -> float:
        batch_times = peer.generate([ids], 1)
        return batch_times.first - batch_times.start

    arms = {"ours": ours, "theirs": theirs}
    times = measure_in_turn(arms, config.repetitions, progress=progress)
    label = f"first token, 5 cached documents of {config.document_tokens}, new order"
    milliseconds = {name: t.map(lambda s: s * 1e3) for name, t in times.items()}
    row = _row("ms", milliseconds["ours"], milliseconds["theirs"], higher_is_better=False)
    return {"measurement": label, "longest_prompt": len(ids), **row}


def _row(unit: str, ours: Samples, theirs: Samples, *, higher_is_better: bool) -> Row:
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
