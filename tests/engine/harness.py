"""Engines under observation: what each output's logits were, and random words to ask about."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looseleaf import LLM, Document, SamplingParams
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.engine.runner.runner import Runner
from looseleaf.engine.runner.step_sampler import logit_sequences
from looseleaf.engine.scheduler import StepWork
from looseleaf.prompt.request import Prompt, Request
from tests.checkpoints import FAMILIES, ROPE_LAWS

Folder = Callable[..., Path]

TOLERANCE = 1e-4
"""How far fp32 logits of two right computations may differ."""

CASES = [
    *((family, "default", 16) for family in FAMILIES),
    ("phi3", "longrope", 16),
    *(("llama", law, 16) for law in ROPE_LAWS if law != "default"),
    *(("llama", law, page_size) for page_size, law in ((32, "default"), (64, "yarn"))),
]
"""Every family, every RoPE law and every page size at least once: (family, RoPE law, page size)."""

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def drawn(seed: int, max_tokens: int = 6, **options: Any) -> SamplingParams:
    """Tokens drawn with a seed: unlike a random model's greedy ones they hardly ever repeat."""
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, **options)


def words(seed: int, length: int) -> str:
    """``length`` characters, about as many tokens."""
    letters = random.Random(seed).choices("abcdefghijklmno pqrstuvwxyz", k=length - 1)
    return "".join(letters) + "."


def document(seed: int, length: int = 30, **options: Any) -> Document:
    return Document(words(1000 + seed, length), name=f"d{seed}", **options)


class Recorder:
    """A runner that keeps the logits behind every token of every output."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.logits: dict[tuple[str, int], list[Tensor]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def run(self, work: StepWork, previous: Tensor | None = None) -> Any:
        result = self.runner.run(work, previous)
        for sequence, row in zip(logit_sequences(work), result.logits, strict=True):
            self.logits[sequence.request_id, sequence.index].append(row.clone())
        return result


@dataclass(frozen=True)
class Answer:
    """An output with the logits of its first completion, ``[tokens, vocab_size]``."""

    output: RequestOutput
    logits: Tensor

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.output.token_ids

    @property
    def all_token_ids(self) -> list[int]:
        return [*self.output.prompt_token_ids, *self.output.token_ids]


def make_llm(folder: Path, **options: Any) -> LLM:
    """An fp32 engine on the CPU with a recorder."""
    llm = LLM(folder, **{"dtype": "float32", "device": "cpu", "num_pages": 96, **options})
    llm.engine.runner = Recorder(llm.engine.runner)  # type: ignore[assignment]
    return llm


def ask(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
) -> list[Answer]:
    """The answers of one call, after which no page is lost and nothing runs."""
    outputs = llm.generate(prompts, params)
    assert_idle(llm)
    recorder: Any = llm.engine.runner
    return [Answer(o, torch.stack(recorder.logits[o.request_id, 0])) for o in outputs]


def ask_in_turn(llm: LLM, arrivals: Sequence[tuple[int, Prompt, SamplingParams]]) -> list[Answer]:
    """The answers to prompts that arrive before the given step each."""
    engine, added = llm.engine, []
    for step in range(1000):
        for number, (at_step, prompt, params) in enumerate(arrivals):
            if at_step == step:
                name = f"{id(arrivals)}-{number}"
                request = Request(name, engine.prompts.from_parts(prompt), params)
                added.append((number, engine.add(request)))
        if len(added) == len(arrivals) and not engine.has_work:
            break
        engine.step()
        engine.check()
    assert_idle(llm)
    recorder: Any = engine.runner
    outputs = [progress.output() for _, progress in sorted(added, key=lambda pair: pair[0])]
    return [Answer(o, torch.stack(recorder.logits.pop((o.request_id, 0)))) for o in outputs]


def assert_idle(llm: LLM) -> None:
    """Nothing runs, every page is free or belongs to a segment that nobody refers to."""
    llm.engine.check()
    assert not llm.engine.has_work
    assert all(segment.references == 0 for segment in llm.engine.store.segments())
    assert llm.engine.store.num_available == llm.engine.store.pool.num_pages


def assert_same_answers(mine: Sequence[Answer], others: Sequence[Answer]) -> None:
    """The same tokens, from the same logits up to rounding."""
    for one, other in zip(mine, others, strict=True):
        assert one.output.prompt_token_ids == other.output.prompt_token_ids
        assert one.token_ids == other.token_ids
        assert worst(one.logits, other.logits) <= TOLERANCE


def worst(mine: Tensor, other: Tensor) -> float:
    assert mine.shape == other.shape
    return float((mine - other).abs().max())
