"""What a caller gets back: completions, and a report of what was reused and what was computed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from looseleaf.config import EVICTING, Fuse, Revise, Select
from looseleaf.engine.sampling import TokenLogprob
from looseleaf.retro import exposure_ratios

DocumentSource = Literal["cached", "computed", "awaited", "loaded"]


@dataclass(frozen=True)
class DocumentReuse:
    """One document of a request: its tokens, and whether their keys and values were ``cached``
    already, ``computed`` by this request, ``loaded`` for it from a ``tier``, or ``awaited`` since
    they were on their way for another request. What could not be loaded after all is ``computed``,
    and ``tier`` names the one that failed.

    ``seconds`` is how long they took to be there, None while they are not: 0 if cached, else since
    the step that began to compute them here, or since the admission if another request did.
    ``recomputed`` of its tokens this request computed again, in their place in its prompt; 0 until
    they are chosen. A ``hosted`` one is cached outside of the pool."""

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
    """What was expected of the documents that came from tiers, and what it was, in seconds.

    ``tiers`` names them; ``num_bytes`` is what was asked of them, but for what failed to come.
    ``load_predicted`` is for the loads alone, ``total_predicted`` with all that the request
    computes until its first token, as far as that does not hide behind them: None where nothing
    was known, where it waits for what another one computes, and where tokens are chosen by passes
    of their own.
    ``load_seconds`` and ``total_seconds`` are how long that took, the latter until the first token;
    None while it is not there. ``ratio`` is the share of tokens that the controller chose to
    compute again, None where it was not asked for one."""

    tiers: tuple[str, ...] = ()
    num_bytes: int = 0
    load_predicted: float | None = None
    load_seconds: float | None = None
    total_predicted: float | None = None
    total_seconds: float | None = None
    ratio: float | None = None

    def __str__(self) -> str:
        def times(predicted: float | None, actual: float | None) -> str:
            known = {"expected": predicted, "took": actual}
            said = [f"{w} {1e3 * s:.1f} ms" for w, s in known.items() if s is not None]
            return ", ".join(said) or "not timed"

        parts = [f"first token: {times(self.total_predicted, self.total_seconds)}"]
        if self.tiers:
            came = f"{self.num_bytes / (1 << 20):.2f} MiB from {', '.join(self.tiers)}"
            parts.insert(0, f"{came}: {times(self.load_predicted, self.load_seconds)}")
        if self.ratio is not None:
            parts.append(f"share chosen: {self.ratio:.2f}")
        return "; ".join(parts)


@dataclass(frozen=True)
class ReuseReport:
    """Where a prompt's keys and values came from, as it was when the request was admitted.

    Text tokens are cached only as an exact prefix; document tokens are reused from an encoding of
    their own, which is not the same thing and is never added to it. ``preempted_tokens`` were
    computed again after the request had to make room. ``fuse`` is the policy that was in force:
    None for plain reuse, also where more was asked for and there was nothing to choose from.
    ``loading`` is there if documents came from tiers, which those that failed to did not, or if the
    ratio was the controller's."""

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

    ``stop_reason`` is the stop string or stop token id that ended it. ``logprobs`` has one entry a
    token if they were asked for: the token itself, then the likeliest."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds since the request arrived: admission, first token, end. None until it
    happened.
    """

    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True)
class AttentionPath:
    """How a request's decode rows read their keys.

    ``decode_steps`` counts rows, one an output and step; in ``grouped_steps`` of them the row
    shared a read with rows of other outputs. Of the ``keys_read`` in all, ``keys_shared`` were read
    that way."""

    decode_steps: int = 0
    grouped_steps: int = 0
    keys_read: int = 0
    keys_shared: int = 0


@dataclass(frozen=True)
class RevisionReport:
    """How much revision added to what rows read.

    ``pages_read[n]`` are pages that the rows looked at, one in eight, read at their own step or one
    of the ``n`` steps behind it, summed over layers and KV heads; only sealed pages count. Of
    hosted documents ``keys_read[n]`` are keys that rows read so, for ``n`` below the window, summed
    over layers and query heads; one of both is empty."""

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
        whole, what = self.exposure[self.revise.window - 1], "pages" if self.pages_read else "keys"
        return (
            f"revise: {self.revise}; a row read {whole:.2f} times its own {what}, with those that "
            "later rows chose"
        )


@dataclass(frozen=True)
class SelectReport:
    """What the decode rows of a request read, under its policy.

    Rows and tokens are counted one an output and step: in ``chosen_steps`` of them pages were
    chosen, in ``dense_steps`` all were read, because they fit the budget or were few. Pages are
    counted once a layer and KV head: ``pages_read`` of the ``pages_held``. Of hosted documents keys
    are chosen, and counted once a layer and query head: ``keys_read`` of the ``keys_there``. Where
    keys are thrown away nothing is counted. ``bytes_read`` are those of the keys and values read,
    and of what is kept of pages to choose by, but not of what an index compared. ``recall`` is the
    share of the attention that the pages read
    held, on the rows that were measured; None without any."""

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
        """The share that a row read of what its policy chooses from, its context or the hosted
        documents, on average over rows, layers and heads."""
        if self.keys_there:
            return self.keys_read / self.keys_there
        return self.pages_read / self.pages_held if self.pages_held else 1.0

    def plus_recall(self, recall: float) -> "SelectReport":
        """With one measured row more."""
        mean = ((self.recall or 0.0) * self.recall_rows + recall) / (self.recall_rows + 1)
        return replace(self, recall=mean, recall_rows=self.recall_rows + 1)

    def __str__(self) -> str:
        if self.select.policy in EVICTING:
            return f"select: {self.select}; keys are thrown away, and all that are left are read"
        held = "" if self.recall is None else f", which held {self.recall:.1%} of the attention"
        what = "keys of hosted documents" if self.keys_there else "pages"
        layers = ", ".join(map(str, self.select.layers_read_densely))
        dense = f"; layers {layers} read everything, by dense_layers" if layers else ""
        return (
            f"select: {self.select}; {self.chosen_steps} of {self.chosen_steps + self.dense_steps} "
            f"rows chose, {self.exposure:.1%} of all {what} were read{held}{dense}"
        )


@dataclass(frozen=True)
class RequestOutput:
    """The state of a request after a step; final if ``finished``. ``revision`` is None until then,
    and where nothing is revised."""

    request_id: str
    prompt_token_ids: Sequence[int]
    outputs: tuple[CompletionOutput, ...]
    reuse: ReuseReport
    metrics: RequestMetrics
    finished: bool
    attention: AttentionPath = AttentionPath()
    revision: RevisionReport | None = None
    select: SelectReport | None = None

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first output."""
        return self.outputs[0].token_ids
