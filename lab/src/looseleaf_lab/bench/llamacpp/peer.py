"""llama.cpp as a peer: a GGUF file, its cache of keys and values, and greedy tokens.

Calls go to the C API that ``llama-cpp-python`` binds, so no wrapper's time is measured.
"""

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from looseleaf_lab.bench.llamacpp.forms import bindings
from looseleaf_lab.errors import BenchmarkRefused

CACHE_REUSE = 256
"""Shortest chunk of cached tokens that moves to a new position, as of ``--cache-reuse 256``."""


class Shift(NamedTuple):
    """Cached tokens from ``start`` to ``stop`` move to ``target``."""

    start: int
    stop: int
    target: int


class LlamaCpp:
    """A model and a context of ``sequences`` sequences of up to ``length`` tokens each."""

    def __init__(self, model: Path, length: int, sequences: int, threads: int) -> None:
        self._api: Any = bindings()
        settings = self._api.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = self._api.llama_model_load_from_file(str(model).encode(), settings)
        if not self._model:
            raise BenchmarkRefused(f"llama.cpp can't load {model}")
        self._threads = threads
        self._context, self._batch = self._make_context(length, sequences)
        self._memory = self._api.llama_get_memory(self._context)
        self.cached: list[int] = []
        self.vocabulary = self._api.llama_vocab_n_tokens(
            self._api.llama_model_get_vocab(self._model)
        )

    def resize(self, length: int, sequences: int) -> None:
        """A new context, with nothing cached."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._context, self._batch = self._make_context(length, sequences)
        self._memory = self._api.llama_get_memory(self._context)
        self.cached = []

    def _make_context(self, length: int, sequences: int) -> tuple[Any, Any]:
        options = self._api.llama_context_default_params()
        # a sequence's share is rounded up to whole blocks
        options.n_ctx = (length + 255) // 256 * 256 * sequences
        options.n_seq_max = sequences
        options.n_batch, options.n_ubatch = 2048, 512
        options.n_threads = options.n_threads_batch = self._threads
        options.no_perf = True
        context = self._api.llama_init_from_model(self._model, options)
        if not context:
            raise BenchmarkRefused("llama.cpp can't make a context of this size")
        return context, self._api.llama_batch_init(2048, 0, 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return int(self._api.llama_model_size(self._model))

    def forget(self, sequence: int = -1, start: int = 0) -> None:
        """Drops what is cached from ``start``; -1 names all sequences."""
        self._api.llama_memory_seq_rm(self._memory, sequence, start, -1)
        if sequence <= 0:
            del self.cached[start:]

    def prefill(self, tokens: Sequence[int], sequence: int = 0, start: int = 0) -> int:
        """Computes a prompt from position ``start`` on; returns its next token."""
        for first in range(0, len(tokens), 2048):
            part = tokens[first : first + 2048]
            is_last = first + len(part) == len(tokens)
            rows = [(token, start + first + n, sequence) for n, token in enumerate(part)]
            self._run(rows, only_last=True)
            if is_last and sequence == 0:
                self.cached = [*self.cached[:start], *tokens]
        return self._greedy(-1)

    def decode(self, tokens: Sequence[int], position: int) -> list[int]:
        """One step: token n continues sequence n at ``position``; returns the next tokens."""
        self._run([(token, position, n) for n, token in enumerate(tokens)], only_last=False)
        return [self._greedy(row) for row in range(len(tokens))]

    def prefill_reused(self, tokens: Sequence[int]) -> int:
        """Computes what of a prompt is not cached, as its server does with ``--cache-reuse``."""
        prefix, shifts = plan_reuse(self.cached, tokens)
        kept = prefix
        for shift in shifts:
            self._api.llama_memory_seq_rm(self._memory, 0, shift.target, shift.start)
            distance = shift.target - shift.start
            self._api.llama_memory_seq_add(self._memory, 0, shift.start, shift.stop, distance)
            kept = shift.target + shift.stop - shift.start
        # the last token is computed for its logits
        kept = min(kept, len(tokens) - 1)
        self.cached = [*tokens[:kept]]
        self._api.llama_memory_seq_rm(self._memory, 0, kept, -1)
        return self.prefill(tokens[kept:], 0, kept)

    def _run(self, rows: Sequence[tuple[int, int, int]], *, only_last: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for n, (token, position, sequence) in enumerate(rows):
            batch.token[n], batch.pos[n] = token, position
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
            batch.logits[n] = not only_last or n == len(rows) - 1
        if self._api.llama_decode(self._context, batch):
            raise BenchmarkRefused("llama.cpp can't decode a batch")

    def _greedy(self, row: int) -> int:
        pointer = self._api.llama_get_logits_ith(self._context, row)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (self.vocabulary,)).argmax())


def plan_reuse(
    cached: Sequence[int], prompt: Sequence[int], shortest: int = CACHE_REUSE
) -> tuple[int, list[Shift]]:
    """The common prefix's length, and the chunks behind it that move to the prompt's positions.

    As llama.cpp's server: cached tokens are walked through once, forward. A chunk that equals the
    prompt at its next position for ``shortest`` tokens moves there; other tokens are dropped."""
    prefix = _equal(cached, prompt, 0, 0)
    return prefix, [*_shifts(cached, prompt, prefix, shortest)]


def _shifts(
    cached: Sequence[int], prompt: Sequence[int], target: int, shortest: int
) -> Iterator[Shift]:
    start = target
    while start < len(cached) and target < len(prompt):
        length = _equal(cached, prompt, start, target)
        if length >= shortest:
            yield Shift(start, start + length, target)
            start, target = start + length, target + length
        else:
            start += 1


def _equal(cached: Sequence[int], prompt: Sequence[int], start: int, target: int) -> int:
    """Number of equal tokens from ``cached[start]`` and ``prompt[target]`` on."""
    longest = min(len(cached) - start, len(prompt) - target)
    for length in range(longest):
        if cached[start + length] != prompt[target + length]:
            return length
    return longest
