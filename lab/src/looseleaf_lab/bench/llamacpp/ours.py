"""Looseleaf as the measured side: token ids in, times of an engine's steps out."""

import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from looseleaf.llm.llm import LLM
from looseleaf.prompt.request import DocumentPart, PromptParts, Request, TextPart
from looseleaf.sampling_params import SamplingParams

Ids = tuple[int, ...]


class Looseleaf:
    """An engine on a CPU for prompts of up to ``longest`` tokens."""

    def __init__(self, model: Path, longest: int, num_pages: int) -> None:
        llm = LLM(
            str(model), device="cpu", max_model_len=longest, num_pages=num_pages,
            max_num_batched_tokens=16384,
        )  # fmt: skip
        self.engine = llm.engine
        self.config = llm.engine.runner.model.config
        self.dtype = str(llm.engine.runner.model.dtype).removeprefix("torch.")
        self._names = count()

    def token_bytes(self) -> int:
        """Bytes of keys and values per token."""
        config, size = self.config, self.engine.runner.model.dtype.itemsize
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * size

    def forget(self) -> None:
        """Drops everything that no request reads."""
        self.engine.store.evict_idle()

    def first_token(self, prompts: Sequence[PromptParts]) -> float:
        """Seconds until each prompt has its first token."""
        start = time.perf_counter()
        self._add(prompts, 1)
        self._finish()
        return time.perf_counter() - start

    def decode(self, prompts: Sequence[Ids], steps: int) -> float:
        """Seconds of a step that decodes one token for each prompt; the least of ``steps``."""
        self._add([(TextPart(ids),) for ids in prompts], steps + 1)
        engine, times = self.engine, []
        counters = engine.counters
        while engine.has_work:
            before, start = counters.output_tokens, time.perf_counter()
            engine.step()
            if counters.output_tokens - before == len(prompts):
                times.append(time.perf_counter() - start)
        # the first step may include prompts, and the last one starts no new tokens
        return min(times[2:-1])

    def _add(self, prompts: Sequence[PromptParts], tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for prompt in prompts:
            self.engine.add(Request(f"llamacpp-{next(self._names)}", prompt, params))

    def _finish(self) -> None:
        while self.engine.has_work:
            self.engine.step()


def with_documents(documents: Sequence[Ids], question: Ids) -> PromptParts:
    """Independent documents, then a question."""
    parts = (DocumentPart(ids, 0, f"document {n + 1}") for n, ids in enumerate(documents))
    return (*parts, TextPart(question))
