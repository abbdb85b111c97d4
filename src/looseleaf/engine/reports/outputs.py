"""Outputs of requests: completions, metrics, and reports of reused, computed and loaded tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from looseleaf.config import EVICTING, Fuse, Revise, Select
from looseleaf.engine.sampling.sampler import TokenLogprob
from looseleaf.retro import exposure_ratios
from looseleaf.tiers import Load

DocumentSource = Literal["cached", "computed", "awaited", "loaded"]


@dataclass(frozen=True)
class DocumentReuse:
    """One document of a request, and the source of its keys and values.

    ``cached`` documents were in the cache, this request ``computed`` them, or a ``tier`` ``loaded``
    them. ``awaited`` documents were in progress for another request. After a failed load the source
    is ``computed``, and ``tier`` is the tier that failed.

    ``seconds`` is the time until all keys and values were ready, None before. It is 0 for cached
    documents. It counts from the first step that computes them, or from the admission if another
    request computes them. ``recomputed`` counts the tokens that this request computed again at
    their positions in its prompt; 0 until they are chosen. A ``hosted`` document is cached outside
    of the pool."""

    name: str
    num_tokens: int
    offset: int
    source: DocumentSource
    seconds: float | None = None
    recomputed: int = 0
    tier: str | None = None
    hosted: bool = False


@dataclass(frozen=True)
class LoadingReport:
    """Predicted and measured times of the documents that load from tiers, in seconds.

    ``tiers`` are the tiers of these documents, and ``num_bytes`` the bytes of all loads that did
    not fail. ``load_predicted`` is the time of the loads. ``total_predicted`` adds the compute time
    until the first token, as far as it does not overlap with loads. A prediction is None without
    measurements. ``total_predicted`` is also None if the request waits for a document of another
    request, or if token scoring chooses tokens.

    ``load_seconds`` and ``total_seconds`` are the measured times, None before their end.
    ``ratio`` is the share of tokens that the load controller chose to compute again, None without
    this choice."""

    tiers: tuple[str, ...] = ()
    num_bytes: int = 0
    load_predicted: float | None = None
    load_seconds: float | None = None
    total_predicted: float | None = None
    total_seconds: float | None = None
    ratio: float | None = None

    def __str__(self) -> str:
        def times(predicted: float | None, actual: float | None) -> str:
            seconds = {"expected": predicted, "took": actual}
            texts = [f"{w} {1e3 * s:.1f} ms" for w, s in seconds.items() if s is not None]
            return ", ".join(texts) or "not timed"

        parts = [f"first token: {times(self.total_predicted, self.total_seconds)}"]
        if self.tiers:
            size = f"{self.num_bytes / (1 << 20):.2f} MiB from {', '.join(self.tiers)}"
            parts.insert(0, f"{size}: {times(self.load_predicted, self.load_seconds)}")
        if self.ratio is not None:
            parts.append(f"share chosen: {self.ratio:.2f}")
        return "; ".join(parts)


@dataclass(frozen=True)
class ReuseReport:
    """The sources of a prompt's keys and values, at the admission of the request.

    Text tokens are cached only as an exact prefix. Document tokens are reused from a separate
    encoding, so the two counts are never added. ``preempted_tokens`` were computed again after a
    preemption. ``fuse`` is the policy in force. It is None for plain reuse, and for a prompt
    without candidate tokens. ``loading`` is None unless documents loaded from tiers or the load
    controller chose the ratio."""

    documents: tuple[DocumentReuse, ...] = ()
    text_tokens: int = 0
    text_tokens_cached: int = 0
    preempted_tokens: int = 0
    fuse: Fuse | None = None
    loading: LoadingReport | None = None

    @property
    def document_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(document.num_tokens for document in self.documents)

    @property
    def document_tokens_reused(self) -> int:
        """Document tokens that this request did not compute."""
        return sum(d.num_tokens for d in self.documents if d.source != "computed")

    @property
    def document_tokens_computed(self) -> int:
        """Document tokens that this request computed."""
        return self.document_tokens - self.document_tokens_reused

    def __str__(self) -> str:
        lines = [
            f"{d.name}: {d.num_tokens} tokens from position {d.offset}, "
            + ("hosted" if d.hosted else d.source)
            + (f" from {d.tier}" if d.source == "loaded" else "")
            + (f", since the {d.tier} tier failed" if d.tier and d.source == "computed" else "")
            + (f", {d.recomputed} computed again" if d.recomputed else "")
            for d in self.documents
        ]
        total = (
            f"documents: {self.document_tokens_reused} of {self.document_tokens} tokens reused; "
            f"text: {self.text_tokens_cached} of {self.text_tokens} tokens from the prefix cache"
        )
        policy = [f"fuse: {self.fuse}"] if self.fuse else []
        loading = [f"loading: {self.loading}"] if self.loading else []
        return "\n".join([*lines, *policy, *loading, total])

    @property
    def document_tokens_recomputed(self) -> int:
        """Document tokens that this request computed again."""
        return sum(document.recomputed for document in self.documents)


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a request. ``finish_reason`` is None while it grows, then stop, length or
    abort.

    ``stop_reason`` is the stop string or stop token id that ended it. ``logprobs``, if requested,
    has one entry per token: the token itself, then the likeliest tokens."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times of admission, first token and end, in seconds since the request arrived; None before
    the event.
    """

    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True)
class AttentionPath:
    """The reads of a request's decode rows.

    ``decode_steps`` counts rows, one per output and step. ``grouped_steps`` counts the rows that
    shared a read with rows of other outputs. ``keys_read`` counts all keys, and ``keys_shared`` the
    keys of shared reads."""

    decode_steps: int = 0
    grouped_steps: int = 0
    keys_read: int = 0
    keys_shared: int = 0


@dataclass(frozen=True)
class RevisionReport:
    """The pages or keys that revision added to the reads of rows.

    ``pages_read[n]`` counts the sealed pages that rows read at their own step or at one of the
    ``n`` following steps, summed over layers and KV heads. One row in eight is sampled.
    ``keys_read[n]`` counts the keys of hosted documents in the same way, for ``n`` below the
    window, summed over layers and query heads. One of the two is empty."""

    revise: Revise
    pages_read: tuple[int, ...] = ()
    keys_read: tuple[int, ...] = ()

    @property
    def exposure(self) -> list[float]:
        """The effective KV budget with 0, 1, … later rows, as a multiple of a row's own."""
        return exposure_ratios(self.pages_read or self.keys_read)

    def __str__(self) -> str:
        if self.revise.window == 1 or not any(self.pages_read or self.keys_read):
            return f"revise: {self.revise}"
        whole, unit = self.exposure[self.revise.window - 1], "pages" if self.pages_read else "keys"
        return (
            f"revise: {self.revise}; a row read {whole:.2f} times its own {unit}, with those that "
            "later rows chose"
        )


@dataclass(frozen=True)
class SelectReport:
    """The reads of a request's decode rows under its policy.

    Rows count once per output and step. Rows of ``chosen_steps`` chose pages; rows of
    ``dense_steps`` read all pages, because they fit the budget or were few. ``pages_read`` of
    ``pages_held`` count pages once per layer and KV head. ``keys_read`` of ``keys_there`` count the
    keys of hosted documents once per layer and query head. Policies that evict keys count neither.

    ``bytes_read`` counts keys, values and page summaries, without the comparisons of an index.
    ``recall`` is the attention share of the pages read, as a mean over the measured rows; None
    without such rows."""

    select: Select
    chosen_steps: int = 0
    dense_steps: int = 0
    pages_read: int = 0
    pages_held: int = 0
    keys_read: int = 0
    keys_there: int = 0
    bytes_read: int = 0
    recall: float | None = None
    recall_rows: int = 0

    @property
    def exposure(self) -> float:
        """The share of the context, or of the hosted documents, that a row read. It is a mean over
        rows, layers and heads."""
        if self.keys_there:
            return self.keys_read / self.keys_there
        return self.pages_read / self.pages_held if self.pages_held else 1.0

    def plus_recall(self, recall: float) -> "SelectReport":
        """A copy with the recall of one more measured row."""
        mean = ((self.recall or 0.0) * self.recall_rows + recall) / (self.recall_rows + 1)
        return replace(self, recall=mean, recall_rows=self.recall_rows + 1)

    def __str__(self) -> str:
        if self.select.policy in EVICTING:
            return f"select: {self.select}; keys are thrown away, and all that are left are read"
        recall = "" if self.recall is None else f", which held {self.recall:.1%} of the attention"
        unit = "keys of hosted documents" if self.keys_there else "pages"
        layers = ", ".join(map(str, self.select.layers_read_densely))
        dense = f"; layers {layers} read everything, by dense_layers" if layers else ""
        return (
            f"select: {self.select}; {self.chosen_steps} of {self.chosen_steps + self.dense_steps} "
            f"rows chose, {self.exposure:.1%} of all {unit} were read{recall}{dense}"
        )


@dataclass(frozen=True)
class RequestOutput:
    """The state of a request after a step; final if ``finished``. ``revision`` is None before the
    end, and without revision.

    ``prompt_logprobs``, if requested, has one entry per prompt token once the prompt is computed:
    the token itself, then the likeliest tokens. An entry is None without a score: before
    ``prompt_logprobs_start``, for the first token, and for tokens that follow a document's token.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    outputs: tuple[CompletionOutput, ...]
    reuse: ReuseReport
    metrics: RequestMetrics
    finished: bool
    attention: AttentionPath = AttentionPath()
    revision: RevisionReport | None = None
    select: SelectReport | None = None
    prompt_logprobs: tuple[tuple[TokenLogprob, ...] | None, ...] | None = None

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first output."""
        return self.outputs[0].token_ids


@dataclass(eq=False)
class Arrivals:
    """The loads of a sequence, and the load controller's predictions in seconds.

    A prediction is None without measurements. ``ratio`` is the recompute ratio that the controller
    chose, None without this choice."""

    loads: list[Load] = field(default_factory=list)
    load_predicted: float | None = None
    total_predicted: float | None = None
    ratio: float | None = None

    def report(self, total_seconds: float | None) -> LoadingReport | None:
        """The report for the caller, without failed loads.

        ``total_seconds`` is the time from admission to the first token. Returns None if all loads
        failed and the controller chose no ratio."""
        loads = [load for load in self.loads if load.state in ("loading", "done")]
        if self.loads and not loads and self.ratio is None:
            return None
        return LoadingReport(
            tiers=tuple(dict.fromkeys(load.tier for load in loads)),
            num_bytes=sum(load.record.num_bytes for load in loads),
            load_predicted=self.load_predicted,
            load_seconds=_longest([load.seconds for load in loads]),
            total_predicted=self.total_predicted,
            total_seconds=total_seconds,
            ratio=self.ratio,
        )


def _longest(times: Sequence[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return max(known) if known and len(known) == len(times) else None
