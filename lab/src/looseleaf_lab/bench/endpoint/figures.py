"""Statistics of answers: first tokens, times per token, gaps, rates and errors by kind."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Figures = dict[str, str | int | float]


@dataclass(frozen=True)
class Answer:
    """Times (s, of one clock) of a request and of its chunks; ``error`` is its kind, or "".

    ``entered`` marks a request that arrived beside the streams of a closed loop.

    ``tokens`` and ``prompt_tokens`` are the server's counts. Without usage, ``tokens`` is the
    number of chunks, and ``prompt_tokens`` is 0."""

    start: float
    chunks: tuple[float, ...] = ()
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""
    entered: bool = False

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive chunks."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values don't exceed; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    # rounding hides the error of products such as 0.07 * 100
    rank = math.ceil(round(share * len(ordered), 9))
    return ordered[max(0, rank - 1)]


def summarize(answers: Sequence[Answer]) -> Figures:
    """The figures of a load. Times in milliseconds; answers with an error count only as errors.

    Tokens per second are those of complete answers between the first start and the last chunk.
    Requests that entered beside the streams count in first tokens only."""
    complete = [answer for answer in answers if not answer.error]
    streams = [answer for answer in complete if not answer.entered]
    first = [1e3 * (a.chunks[0] - a.start) for a in complete]
    per_token = [
        1e3 * (a.chunks[-1] - a.chunks[0]) / (a.tokens - 1)
        for a in streams
        if len(a.chunks) > 1 < a.tokens
    ]
    gaps = [1e3 * gap for a in streams for gap in a.gaps]
    tokens = sum(a.tokens for a in streams)
    seconds = 0.0
    if streams:
        seconds = max(a.chunks[-1] for a in streams) - min(a.start for a in streams)
    errors = Counter(answer.error for answer in answers if answer.error)
    return {
        "requests": len(answers),
        "complete": len(complete),
        "prompt_tokens": sum(a.prompt_tokens for a in complete) / max(1, len(complete)),
        "output_tokens": tokens / max(1, len(streams)),
        "first_token_p50_ms": percentile(first, 0.5),
        "first_token_p99_ms": percentile(first, 0.99),
        "first_token_max_ms": max(first, default=0.0),
        "per_token_p50_ms": percentile(per_token, 0.5),
        "per_token_p99_ms": percentile(per_token, 0.99),
        "gap_p50_ms": percentile(gaps, 0.5),
        "gap_p99_ms": percentile(gaps, 0.99),
        "gap_max_ms": max(gaps, default=0.0),
        "tokens_per_s": tokens / seconds if seconds else 0.0,
        "errors": ", ".join(f"{kind}: {n}" for kind, n in sorted(errors.items())) or "none",
    }
