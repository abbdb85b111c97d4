"""The progress of a request: its outputs so far, its reuse, its times and its deadline."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from looseleaf.engine.reports.outputs import (
    AttentionPath,
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    ReuseReport,
    RevisionReport,
    SelectReport,
)
from looseleaf.engine.sampling.sampler import TokenLogprob
from looseleaf.engine.sampling.state import SamplingState
from looseleaf.engine.sampling.stopping import StopChecker
from looseleaf.engine.sequence import Sequence
from looseleaf.errors import DeadlineExceeded, LooseleafError
from looseleaf.models.tokenizer.detokenizer import Detokenizer
from looseleaf.prompt.request import Request
from looseleaf.retro.revision import revision_of


@dataclass(eq=False)
class OutputProgress:
    """One output: its sequence, the sampler's and the stop checker's state, and its text.

    ``detokenizer`` is None if the caller decodes the tokens."""

    request: "RequestProgress"
    sequence: Sequence
    sampling: SamplingState
    stop: StopChecker
    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    total_logprob: float = 0.0
    reuse: ReuseReport | None = None

    @property
    def finished(self) -> bool:
        return self.stop.finish is not None

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(self.token_ids)

    def push(self, token: int, logprobs: tuple[TokenLogprob, ...] | None) -> None:
        """Append the next token; the sequence grows unless the output ends with it."""
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.total_logprob += logprobs[0].logprob
        stream = self.detokenizer
        text = "" if stream is None or self.stop.drops(token) else stream.push(token)
        finish = self.stop.push(token, text)
        grammar = self.sampling.grammar
        if grammar is not None and (finish is None or finish.reason == "length"):
            grammar.push(token)
            if grammar.complete:
                finish = self.stop.complete()
        if finish is None:
            self.sequence.append(token)
        elif stream is not None:
            # the output may end inside a character
            self.stop.end_text(stream.finish())

    def completion(self) -> CompletionOutput:
        """The output so far, without text that may belong to a stop string."""
        finish = self.stop.finish
        has_logprobs = self.request.request.params.logprobs is not None
        return CompletionOutput(
            index=self.sequence.index,
            text=self.stop.visible_text,
            token_ids=tuple(self.token_ids),
            cumulative_logprob=self.total_logprob if has_logprobs else None,
            logprobs=tuple(self.logprobs) if has_logprobs else None,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop if finish else None,
        )

    def timed_reuse(self) -> ReuseReport | None:
        """The reuse report with current times and recomputed tokens of its documents."""
        if self.reuse is None or not self.reuse.documents:
            return self.reuse
        uses = zip(self.sequence.documents, self.sequence.recomputed(), strict=True)
        documents = []
        for document in self.reuse.documents:
            if not document.hosted:
                use, recomputed = next(uses)
                source = document.source
                if use.fell_back and source == "loaded":
                    source = "computed"
                document = replace(
                    document, source=source, seconds=use.seconds, recomputed=recomputed
                )
            documents.append(document)
        arrivals, times = self.sequence.arrivals, self.request.metrics
        loading = None
        if arrivals is not None:
            begun, first = times.admitted, times.first_token
            loading = arrivals.report(None if begun is None or first is None else first - begun)
        return replace(self.reuse, documents=tuple(documents), loading=loading)


@dataclass(eq=False)
class RequestProgress:
    """A request with its ``n`` outputs; ``seed`` is used if the request has no seed."""

    request: Request
    seed: int = 0
    outputs: list[OutputProgress] = field(default_factory=list)
    preempted_tokens: int = 0
    error: LooseleafError | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    arrived: float = field(default_factory=time.perf_counter)
    decode_steps: int = 0
    grouped_steps: int = 0
    keys_read: int = 0
    keys_shared: int = 0
    select: SelectReport | None = None
    _reuse: ReuseReport | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

    @property
    def due(self) -> float:
        """The deadline, on the clock of ``arrived``."""
        return self.arrived + (math.inf if self.request.deadline is None else self.request.deadline)

    def mark_admitted(self) -> float:
        """Record the first admission; returns the seconds since arrival."""
        seconds = self._elapsed()
        self.metrics = replace(self.metrics, admitted=seconds)
        return seconds

    def mark_token(self) -> float:
        """Record the first token; returns the seconds since arrival."""
        seconds = self._elapsed()
        self.metrics = replace(self.metrics, first_token=seconds)
        return seconds

    def mark_finished(self) -> None:
        if self.metrics.finished is None:
            self.metrics = replace(self.metrics, finished=self._elapsed())

    def output(self) -> RequestOutput:
        """The current state for the caller."""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.token_ids,
            outputs=tuple(output.completion() for output in self.outputs),
            reuse=self._report(),
            metrics=self.metrics,
            finished=self.finished,
            attention=AttentionPath(
                self.decode_steps, self.grouped_steps, self.keys_read, self.keys_shared
            ),
            revision=self._revision() if self.finished else None,
            select=self.select,
            prompt_logprobs=self.prompt_logprobs(),
        )

    def prompt_logprobs(self) -> tuple[tuple[TokenLogprob, ...] | None, ...] | None:
        """The scores of the prompt's tokens, as in `RequestOutput`."""
        scorer = self.outputs[0].sequence.prompt_logprobs if self.outputs else None
        return None if scorer is None else scorer.entries()

    def count_decode(self, keys: int, shared: int) -> None:
        """Count a decode row: the keys that it read, and the keys that it shared with others."""
        self.decode_steps += 1
        self.grouped_steps += shared > 0
        self.keys_read += keys
        self.keys_shared += shared

    def _revision(self) -> RevisionReport | None:
        if self.request.revise is None:
            return None
        revisions = [
            r for output in self.outputs if (r := revision_of(output.sequence)) is not None
        ]
        if not revisions:
            return None
        read = tuple(map(sum, zip(*(revision.counts() for revision in revisions), strict=True)))
        if revisions[0].counts_keys:
            return RevisionReport(self.request.revise, keys_read=read)
        return RevisionReport(self.request.revise, read)

    def count_pages(self, read: int, total: int, num_bytes: int, recall: float | None) -> None:
        """Count the pages of a row of a request with a policy, as in `SelectReport`.

        A row that read all pages was dense."""
        assert self.select is not None, "the request has a policy"
        chosen = read < total
        report = replace(
            self.select,
            chosen_steps=self.select.chosen_steps + chosen,
            dense_steps=self.select.dense_steps + (not chosen),
            pages_read=self.select.pages_read + read,
            pages_held=self.select.pages_held + total,
            bytes_read=self.select.bytes_read + num_bytes,
        )
        self.select = report if recall is None else report.plus_recall(recall)

    def count_hosted(self, read: int, total: int, num_bytes: int) -> None:
        """Count the keys of host-resident documents that a row read, of ``total``."""
        assert self.select is not None, "hosted documents are read by a policy"
        chosen = read < total
        self.select = replace(
            self.select,
            chosen_steps=self.select.chosen_steps + chosen,
            dense_steps=self.select.dense_steps + (not chosen),
            keys_read=self.select.keys_read + read,
            keys_there=self.select.keys_there + total,
            bytes_read=self.select.bytes_read + num_bytes,
        )

    def _report(self) -> ReuseReport:
        # cached after the first token, when its times no longer change
        if self._reuse is not None and self._reuse.preempted_tokens == self.preempted_tokens:
            return self._reuse
        reports = (output.timed_reuse() for output in self.outputs)
        first = next((report for report in reports if report is not None), ReuseReport())
        first = replace(first, preempted_tokens=self.preempted_tokens)
        if self.metrics.first_token is not None:
            self._reuse = first
        return first

    def _elapsed(self) -> float:
        return time.perf_counter() - self.arrived


def deadline_error(progress: RequestProgress) -> DeadlineExceeded:
    """The error of a request whose deadline has passed."""
    return DeadlineExceeded(
        f"the request did not end within its deadline of {progress.request.deadline} s: "
        "allow more time or ask for fewer tokens"
    )


class Deadlines:
    """Request ids by deadline, on the clock `time.perf_counter`.

    ``entries`` is a heap of deadlines and ids, so a request that has ended is not kept in memory.
    Ids of ended requests are dropped once they are more than half of the heap."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, progress: RequestProgress) -> None:
        """Watch a request, if it has a deadline."""
        if progress.request.deadline is not None:
            heappush(self.entries, (progress.due, progress.request.request_id))

    def is_over(self, now: float) -> bool:
        """Whether a deadline has passed that `expired` has not returned."""
        return bool(self.entries) and self.entries[0][0] <= now

    def expired(self, now: float, requests: Mapping[str, RequestProgress]) -> list[RequestProgress]:
        """The requests whose deadline has passed, each once. ``requests`` are all active ones."""
        if len(self.entries) > 2 * len(requests):
            # more than half are dropped, so the scan is amortised over their insertions
            self.entries = [entry for entry in self.entries if _is_due(entry, requests)]
            heapify(self.entries)
        over = []
        while self.entries and self.entries[0][0] <= now:
            entry = heappop(self.entries)
            if _is_due(entry, requests):
                over.append(requests[entry[1]])
        return over


def _is_due(entry: tuple[float, str], requests: Mapping[str, RequestProgress]) -> bool:
    due, name = entry
    progress = requests.get(name)
    # a later request with another deadline may have the same id
    return progress is not None and progress.due == due
