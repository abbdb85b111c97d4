"""``bench agents``: prompts of agents with discovery under fuse policies, against prefix caching.

All arms answer the same prompts in the same order, each in an engine of its own. The prefix arm
is exact, so its greedy answers are the reference of the others' agreement."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from looseleaf.config import Fuse
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.llm.llm import LLM
from looseleaf.prompt.cutting import Cutter
from looseleaf.prompt.discover import Discovery
from looseleaf.prompt.request import PromptParts, Request
from looseleaf.sampling_params import SamplingParams
from looseleaf_lab.bench.agent_traces import Messages, TraceConfig, traces
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.results import Row

ARMS: dict[str, tuple[bool, Fuse | None]] = {
    "prefix caching": (False, None),
    "discover": (True, None),
    "discover, deviation": (True, Fuse("deviation", ratio=0.15)),
    "discover, first": (True, Fuse("first", tokens=16)),
}
"""Whether an arm discovers, and its fuse policy; the last is the best one of the board at its
cost."""


@dataclass(frozen=True)
class AgentsConfig:
    """``skipped`` requests of each trace fill the caches and are not counted."""

    model: Path
    name: str
    trace: TraceConfig = field(default_factory=TraceConfig)
    mooncake: Path | None = None
    skipped: int = 8
    new_tokens: int = 16
    num_pages: int = 2048


def measure(config: AgentsConfig, progress: Progress = SILENT) -> Iterator[Row]:
    """One row per trace and arm."""
    for name, requests in traces(config.trace, config.mooncake).items():
        reference: list[tuple[int, ...]] = []
        baseline = 0.0
        for arm in progress.over([*ARMS], lambda arm, name=name: f"{name}, {arm}"):  # type: ignore[misc]
            outputs, seconds = _answers(config, requests, arm)
            answers = [output.token_ids for output in outputs]
            first = statistics.median(seconds)
            if not reference:
                reference, baseline = answers, first
            row = _row(outputs, answers, reference)
            row |= {"first_token_ms": 1e3 * first, "times_sooner": baseline / first}
            yield {"model": config.name, "trace": name, "arm": arm, **row}


def _answers(
    config: AgentsConfig, requests: Sequence[Messages], arm: str
) -> tuple[list[RequestOutput], list[float]]:
    """The counted outputs, and the seconds to their first tokens, discovery included."""
    discovers, fuse = ARMS[arm]
    llm = LLM(config.model, num_pages=config.num_pages)
    discovery = Discovery(Cutter.of(llm.engine.tokenizer)) if discovers else None
    params = SamplingParams(temperature=0.0, max_tokens=config.new_tokens, ignore_eos=True)
    outputs, seconds = list[RequestOutput](), list[float]()
    for messages in requests:
        parts = llm.engine.prompts.from_messages(messages)
        begun = perf_counter()
        if discovery is not None:
            parts = _discovered(llm, discovery, messages, parts)
        prepared = perf_counter() - begun
        output = _answer(llm, Request(str(len(outputs)), parts, params, fuse=fuse))
        outputs.append(output)
        seconds.append(prepared + (output.metrics.first_token or 0.0))
    return outputs[config.skipped :], seconds[config.skipped :]


def _answer(llm: LLM, request: Request) -> RequestOutput:
    progress = llm.engine.add(request)
    while llm.engine.has_work:
        llm.engine.step()
    return progress.output()


def _discovered(
    llm: LLM, discovery: Discovery, messages: Messages, parts: PromptParts
) -> PromptParts:
    lead_length = llm.engine.prompts.lead_length(messages, parts)
    return discovery.apply(parts, lead_length, "")


def _row(
    outputs: Sequence[RequestOutput],
    answers: Sequence[tuple[int, ...]],
    reference: Sequence[tuple[int, ...]],
) -> Row:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    exact = sum(output.reuse.text_tokens_cached for output in outputs)
    reused = sum(
        document.num_tokens - document.recomputed
        for output in outputs
        for document in output.reuse.documents
        if document.source != "computed"
    )
    same = [answer == other for answer, other in zip(answers, reference, strict=True)]
    first = [answer[:1] == other[:1] for answer, other in zip(answers, reference, strict=True)]
    agreed = [_agreed(a, b) / len(b) for a, b in zip(answers, reference, strict=True)]
    return {
        "requests": len(outputs),
        "prompt_tokens": prompt,
        "exact": exact / prompt,
        "out_of_context": reused / prompt,
        "computed": 1 - (exact + reused) / prompt,
        "same_answer": statistics.fmean(same),
        "same_first_token": statistics.fmean(first),
        "same_tokens": statistics.fmean(agreed),
    }


def _agreed(answer: Sequence[int], reference: Sequence[int]) -> int:
    """Tokens before the first difference."""
    pairs = enumerate(zip(answer, reference, strict=False))
    length = min(len(answer), len(reference))
    return next((n for n, (a, b) in pairs if a != b), length)
