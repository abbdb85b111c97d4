"""The same closed loops on an engine of this process: the rates that a server is measured by."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from looseleaf import LLM, Document, SamplingParams
from looseleaf.engine.progress import RequestProgress
from looseleaf.prompt.request import PromptParts, Request
from looseleaf_lab.bench.endpoint.figures import Answer
from looseleaf_lab.bench.endpoint.workload import Prompt


def run_in_process(llm: LLM, prompts: Sequence[Prompt], streams: int) -> list[Answer]:
    """A closed loop of chats whose chunks are the steps of the engine, in this thread.

    Prompts are tokens before the loop starts. Prompts with a time enter beside the streams."""
    parts = [(prompt, _parts(llm, prompt)) for prompt in prompts]
    loop = _Loop(llm)
    waiting = [pair for pair in parts if not pair[0].at]
    entering = sorted((pair for pair in parts if pair[0].at), key=lambda pair: -pair[0].at)
    waiting.reverse()
    start = time.monotonic()
    while waiting or entering or loop.running:
        while entering and time.monotonic() - start >= entering[-1][0].at:
            loop.add(*entering.pop())
        while waiting and loop.streams < streams:
            loop.add(*waiting.pop())
        if loop.running:
            loop.step()
    return loop.answers


@dataclass
class _Loop:
    """Requests in flight with their prompts, starts and chunks."""

    llm: LLM
    running: dict[str, tuple[Prompt, float, list[float]]] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    streams: int = 0
    _numbers: "count[int]" = field(default_factory=count)

    def add(self, prompt: Prompt, parts: PromptParts) -> None:
        name = f"in-process-{next(self._numbers)}"
        params = SamplingParams(max_tokens=prompt.output, temperature=0.0, ignore_eos=True)
        self.running[name] = (prompt, time.monotonic(), [])
        self.llm.engine.add(Request(name, parts, params, ""))
        self.streams += not prompt.at

    def step(self) -> None:
        changed = self.llm.engine.step()
        now = time.monotonic()
        for progress in changed:
            self._advance(progress, now)

    def _advance(self, progress: RequestProgress, now: float) -> None:
        name = progress.request.request_id
        if name not in self.running:
            return
        prompt, start, chunks = self.running[name]
        if progress.error is not None:
            raise progress.error
        chunks.append(now)
        if progress.finished:
            del self.running[name]
            self.streams -= not prompt.at
            tokens = len(progress.outputs[0].token_ids)
            size = len(progress.request.token_ids)
            self.answers.append(Answer(start, tuple(chunks), tokens, size, entered=bool(prompt.at)))


def _parts(llm: LLM, prompt: Prompt) -> PromptParts:
    content = [*(Document(text) for text in prompt.documents), prompt.text]
    return llm.engine.prompts.from_messages([{"role": "user", "content": content}])
