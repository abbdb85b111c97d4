"""Figures of one GGUF file under one number of threads: Looseleaf and llama.cpp in turn.

Token ids are random and equal for both. Decode is the least time of a step, since other programs
only add to it; prompts take medians. Documents arrive in new orders: Looseleaf has all of them
cached, llama.cpp the parts that its ``--cache-reuse`` finds in the previous order."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from looseleaf.prompt.request import TextPart
from looseleaf_lab.bench.llamacpp.case import FileCase
from looseleaf_lab.bench.llamacpp.ours import Ids, Looseleaf, with_documents
from looseleaf_lab.bench.llamacpp.peer import LlamaCpp
from looseleaf_lab.bench.llamacpp.start import measure_start
from looseleaf_lab.bench.results import Row
from looseleaf_lab.bench.timing import Samples, measure_in_turn

_LONGEST = 2304
_DOCUMENTS, _DOCUMENT_TOKENS, _QUESTION = 5, 424, 36
_BATCH, _BATCH_CONTEXT = 16, 128


class Pair:
    """Both engines with one file."""

    def __init__(self, case: FileCase) -> None:
        self.case = case
        torch.set_num_threads(case.threads)
        pages = _BATCH * 24 + 8 * _LONGEST // 16
        self.ours = Looseleaf(Path(case.path), _LONGEST, pages)
        self.peer = LlamaCpp(Path(case.path), _LONGEST, 1, case.threads)
        self.rate = read_rate()
        self._random = random.Random(0)

    def tokens(self, length: int) -> Ids:
        """New random tokens."""
        return tuple(self._random.choices(range(300, self.peer.vocabulary - 300), k=length))

    def row(self, name: str, seconds: dict[str, float], read: int) -> Row:
        """A row; ``read`` is the bytes that a measured unit must read, 0 without a bound."""
        ours, peer = seconds["looseleaf"], seconds["llama.cpp"]
        shares = [read / value / self.rate if read else "" for value in (ours, peer)]
        return _row(self.case, self.ours.dtype, (name, "ms"), (1e3 * ours, 1e3 * peer), shares) | {
            "read_gb_s": self.rate / 1e9
        }


def read_rate(size: int = 1 << 28) -> float:
    """Bytes per second that the threads of this process read from memory: the best of seven."""
    numbers = torch.ones(size // 8, dtype=torch.int64)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - start)
    return size / min(times)


def measure_file(case: FileCase) -> Iterator[Row]:
    """Rows as they are measured."""
    if set(case.parts) - {"start"}:
        pair = Pair(case)
        for part, figures in _FIGURES.items():
            if part in case.parts:
                yield from figures(pair)
    if "start" in case.parts:
        yield from _start(case)


def _decode(pair: Pair) -> Iterator[Row]:
    for context in (128, 2048):
        prompt = pair.tokens(context)
        pair.peer.forget()
        first = pair.peer.prefill(prompt)

        def theirs(context: int = context, first: int = first) -> float:
            token, times = first, []
            for step in range(pair.case.steps):
                start = time.perf_counter()
                (token,) = pair.peer.decode([token], context + step)
                times.append(time.perf_counter() - start)
            pair.peer.forget(0, context)
            return min(times)

        def ours(prompt: Ids = prompt) -> float:
            return pair.ours.decode([prompt], pair.case.steps)

        read = pair.peer.num_bytes + context * pair.ours.token_bytes()
        yield pair.row(f"decode at {context}", _least(pair, ours, theirs), read)


def _batch(pair: Pair) -> Iterator[Row]:
    prompts = [pair.tokens(_BATCH_CONTEXT) for _ in range(_BATCH)]
    pair.peer.resize(_BATCH_CONTEXT + 2 * pair.case.steps, _BATCH)
    first = [pair.peer.prefill(prompt, n) for n, prompt in enumerate(prompts)]

    def theirs() -> float:
        tokens, times = first, []
        for step in range(pair.case.steps):
            start = time.perf_counter()
            tokens = pair.peer.decode(tokens, _BATCH_CONTEXT + step)
            times.append(time.perf_counter() - start)
        for sequence in range(_BATCH):
            pair.peer.forget(sequence, _BATCH_CONTEXT)
        return min(times)

    def ours() -> float:
        return pair.ours.decode(prompts, pair.case.steps)

    read = pair.peer.num_bytes + _BATCH * _BATCH_CONTEXT * pair.ours.token_bytes()
    seconds = _least(pair, ours, theirs)
    pair.peer.resize(_LONGEST, 1)
    yield pair.row(f"decode, batch {_BATCH}", seconds, read)


def _prefill(pair: Pair) -> Iterator[Row]:
    for length in (512, 2040):
        prompt = pair.tokens(length)

        def ours(prompt: Ids = prompt) -> float:
            pair.ours.forget()
            return pair.ours.first_token([(TextPart(prompt),)])

        def theirs(prompt: Ids = prompt) -> float:
            pair.peer.forget()
            start = time.perf_counter()
            pair.peer.prefill(prompt)
            return time.perf_counter() - start

        yield pair.row(f"prefill {length}", _least(pair, ours, theirs), pair.peer.num_bytes)


def _documents(pair: Pair) -> Iterator[Row]:
    documents = [pair.tokens(_DOCUMENT_TOKENS) for _ in range(_DOCUMENTS)]
    drawn = random.Random(1)
    orders = [drawn.sample(documents, _DOCUMENTS) for _ in range(pair.case.repetitions + 2)]
    questions = [pair.tokens(_QUESTION) for _ in orders]
    turns = {"looseleaf": iter(zip(orders, questions, strict=True)),
             "llama.cpp": iter(zip(orders, questions, strict=True))}  # fmt: skip

    def ours() -> float:
        order, question = next(turns["looseleaf"])
        return pair.ours.first_token([with_documents(order, question)])

    def theirs() -> float:
        order, question = next(turns["llama.cpp"])
        prompt = [*(token for ids in order for token in ids), *question]
        start = time.perf_counter()
        pair.peer.prefill_reused(prompt)
        return time.perf_counter() - start

    pair.ours.forget()
    pair.peer.forget()
    # the first order computes all documents
    samples = measure_in_turn({"looseleaf": ours, "llama.cpp": theirs}, pair.case.repetitions, 2)
    seconds = {name: arm.median for name, arm in samples.items()}
    yield pair.row(f"{_DOCUMENTS} cached documents, new order", seconds, 0)


_FIGURES: dict[str, Callable[[Pair], Iterator[Row]]] = {
    "decode": _decode,
    "batch": _batch,
    "prefill": _prefill,
    "documents": _documents,
}


def _least(pair: Pair, ours: Callable[[], float], theirs: Callable[[], float]) -> dict[str, float]:
    samples = measure_in_turn({"looseleaf": ours, "llama.cpp": theirs}, pair.case.repetitions)
    return {name: min(arm.values) for name, arm in samples.items()}


def _start(case: FileCase) -> Iterator[Row]:
    memory: dict[str, float] = {}

    def start(engine: str) -> float:
        seconds, memory[engine] = measure_start(engine, Path(case.path), case.threads)
        return seconds

    engines = ("looseleaf", "llama.cpp")
    arms = {engine: (lambda engine=engine: start(engine)) for engine in engines}
    samples: dict[str, Samples] = measure_in_turn(arms, min(3, case.repetitions))
    seconds = [min(samples[engine].values) for engine in engines]
    none: list[float | str] = ["", ""]
    yield _row(case, "", ("start to first token", "s"), (seconds[0], seconds[1]), none)
    both = memory["looseleaf"], memory["llama.cpp"]
    yield _row(case, "", ("memory at first token", "MiB"), both, none)


def _row(
    case: FileCase,
    dtype: str,
    label: tuple[str, str],
    figures: tuple[float, float],
    shares: list[float | str],
) -> Row:
    measurement, unit = label
    ours, peer = figures
    return {
        "model": case.model,
        "form": case.form,
        "dtype": dtype,
        "threads": case.threads,
        "measurement": measurement,
        "unit": unit,
        "looseleaf": ours,
        "llamacpp": peer,
        "times_better": peer / ours,
        "share_of_read": shares[0],
        "share_of_read_llamacpp": shares[1],
        "read_gb_s": "",
    }
