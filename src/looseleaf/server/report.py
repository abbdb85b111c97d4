"""The parts of an answer besides its text: usage, reuse and log-probabilities."""

import math
from collections.abc import Sequence
from typing import Any

from looseleaf.engine.reports.outputs import LoadingReport, ReuseReport
from looseleaf.engine.sampling.sampler import TokenLogprob
from looseleaf.llm.client import Output
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.retro import exposure_ratios
from looseleaf.server.policies import effective_policies
from looseleaf.server.prompts import TokenizedPrompt

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON lacks; OpenAI uses the same value."""


def usage(outputs: Sequence[Output]) -> dict[str, Any]:
    """OpenAI's ``usage``, summed over prompts; ``cached_tokens`` were not computed."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(_cached(output.reuse) for output in outputs)
        },
    }


def _cached(report: ReuseReport) -> int:
    """Prompt tokens that were not computed, neither as text nor to fuse documents."""
    reused = [d for d in report.documents if d.source != "computed"]
    return report.text_tokens_cached + sum(d.num_tokens - d.recomputed for d in reused)


def reuse_counts(outputs: Sequence[Output], prompts: Sequence[TokenizedPrompt]) -> dict[str, Any]:
    """Prompt tokens by the origin of their keys and values, summed over prompts."""
    reports = [output.reuse for output in outputs]
    total = sum(len(output.prompt_token_ids) for output in outputs)
    exact = sum(r.text_tokens_cached for r in reports)
    cached = sum(map(_cached, reports))
    lengths = [
        document.num_tokens
        for report, prompt in zip(reports, prompts, strict=False)
        for label, document in zip(prompt.labels, report.documents, strict=False)
        if label.discovered
    ]
    return {
        "level": prompts[0].level,
        "exact": exact,
        "out_of_context": cached - exact,
        "computed": total - cached,
        "discovered": sum(lengths),
    }


def reuse_header(counts: dict[str, Any]) -> str:
    """The value of ``X-Looseleaf-Reuse``."""
    return "exact={exact}, out-of-context={out_of_context}, computed={computed}".format(**counts)


def reuse(outputs: Sequence[Output], prompts: Sequence[TokenizedPrompt]) -> dict[str, Any]:
    """The ``looseleaf`` object: counts are summed over prompts, times are the slowest prompt's."""
    documents = [
        {
            "id": label.id,
            "title": label.title,
            "prompt": number if len(outputs) > 1 else None,
            "tokens": document.num_tokens,
            "offset": document.offset,
            "source": document.source,
            "tier": document.tier,
            "seconds": document.seconds,
            "recomputed": document.recomputed,
            "hosted": document.hosted,
        }
        for number, (output, prompt) in enumerate(zip(outputs, prompts, strict=False))
        for label, document in zip(prompt.labels, output.reuse.documents, strict=False)
        if not label.discovered
    ]
    reports = [output.reuse for output in outputs]
    attention = [output.attention for output in outputs]
    metrics = [output.metrics for output in outputs]
    return {
        "documents": documents,
        "reuse": reuse_counts(outputs, prompts),
        "text_tokens": sum(r.text_tokens for r in reports),
        "text_tokens_cached": sum(r.text_tokens_cached for r in reports),
        "document_tokens_reused": sum(r.document_tokens_reused for r in reports),
        "document_tokens_computed": sum(r.document_tokens_computed for r in reports),
        "document_tokens_recomputed": sum(r.document_tokens_recomputed for r in reports),
        "preempted_tokens": sum(r.preempted_tokens for r in reports),
        "loading": [_loading(r.loading) for r in reports if r.loading is not None],
        "policies": effective_policies(outputs),
        "attention": {
            "decode_steps": sum(a.decode_steps for a in attention),
            "grouped_steps": sum(a.grouped_steps for a in attention),
            "keys_read": sum(a.keys_read for a in attention),
            "keys_shared": sum(a.keys_shared for a in attention),
        },
        "selection": _selection(outputs),
        "revision": _revision(outputs),
        "times": {
            "queued": _slowest([m.admitted for m in metrics]),
            "first_token": _slowest([m.first_token for m in metrics]),
            "total": _slowest([m.finished for m in metrics]),
        },
    }


def _loading(report: LoadingReport) -> dict[str, Any]:
    return {
        "tiers": list(report.tiers),
        "bytes": report.num_bytes,
        "load_predicted": report.load_predicted,
        "load_seconds": report.load_seconds,
        "total_predicted": report.total_predicted,
        "total_seconds": report.total_seconds,
        "ratio": report.ratio,
    }


_SELECTION_SUMS = (
    "chosen_steps",
    "dense_steps",
    "pages_read",
    "pages_held",
    "keys_read",
    "keys_there",
    "bytes_read",
)


def _selection(outputs: Sequence[Output]) -> dict[str, Any] | None:
    """Pages and keys read under a select policy, summed; None without a policy."""
    reports = [output.select for output in outputs if output.select is not None]
    if not reports:
        return None
    recalls = [(r.recall, r.recall_rows) for r in reports if r.recall is not None]
    rows = sum(count for _, count in recalls)
    return {
        **{name: sum(getattr(r, name) for r in reports) for name in _SELECTION_SUMS},
        "recall": sum(recall * count for recall, count in recalls) / rows if rows else None,
    }


def _revision(outputs: Sequence[Output]) -> dict[str, Any] | None:
    """The effective KV exposure over all outputs; None before the end or without revision."""
    reports = [output.revision for output in outputs if output.revision is not None]
    if not reports:
        return None
    reads = zip(*(r.pages_read or r.keys_read for r in reports), strict=True)
    return {"exposure": exposure_ratios([sum(counts) for counts in reads])}


def _slowest(times: Sequence[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return max(known) if len(known) == len(times) else None


Entry = tuple[TokenLogprob, ...]
"""The sampled token, then the most likely other tokens."""


def chat_logprobs(entries: Sequence[Entry], top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Log-probabilities as in chat completions, with the ``top`` most likely tokens of each."""

    def to_json(token: TokenLogprob) -> dict[str, Any]:
        content = tokenizer.token_bytes(token.token_id)
        return {
            "token": content.decode("utf-8", "replace"),
            "logprob": finite(token.logprob),
            "bytes": list(content),
        }

    content = [
        {**to_json(entry[0]), "top_logprobs": [*map(to_json, likeliest(entry, top))]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class TextOffsets:
    """Start offsets of an output's tokens in its text, in characters, after ``prompt``.

    A token may yield no text or delay its text, so lengths of token texts do not add up to these.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._detokenizer = tokenizer.stream()
        self._detokenizer.follow(prompt)
        self._length = 0

    def follow(self, token_ids: Sequence[int]) -> list[int]:
        """The start offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._length)
            self._length += len(self._detokenizer.push(token_id))
        return offsets


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entry | None],
    top: int,
    tokenizer: Tokenizer,
    offsets: TextOffsets,
) -> dict[str, Any]:
    """Log-probabilities as in completions, in columns; ``offsets`` covers all earlier tokens.

    A prompt token may have no entry."""

    def text(token_id: int) -> str:
        return tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def top_logprobs(entry: Entry) -> dict[str, float]:
        # OpenAI always includes the sampled token, beyond ``top`` if necessary
        tokens = [*reversed(likeliest(entry, top)), entry[0]]
        return {text(token.token_id): finite(token.logprob) for token in tokens}

    return {
        "tokens": [text(token_id) for token_id in token_ids],
        "token_logprobs": [entry and finite(entry[0].logprob) for entry in entries],
        "top_logprobs": [entry and top_logprobs(entry) for entry in entries],
        "text_offset": offsets.follow(token_ids),
    }


def prompt_logprobs(
    output: Output, top: int, tokenizer: Tokenizer
) -> list[dict[str, dict[str, Any]] | None]:
    """Scores of a prompt's tokens in vLLM's form: by token id, the token itself and the ``top``."""

    def by_id(entry: Entry) -> dict[str, dict[str, Any]]:
        tokens = dict.fromkeys([entry[0], *likeliest(entry, top)])
        return {
            str(token.token_id): {
                "logprob": finite(token.logprob),
                "rank": token.rank,
                "decoded_token": tokenizer.token_bytes(token.token_id).decode("utf-8", "replace"),
            }
            for token in tokens
        }

    scores = output.prompt_logprobs or ()
    return [None if entry is None else by_id(entry) for entry in scores]


def likeliest(entry: Entry, top: int) -> list[TokenLogprob]:
    """The ``top`` most likely tokens, best first, with or without the sampled token."""
    return sorted(entry, key=lambda token: token.rank)[:top]


def finite(logprob: float) -> float:
    """``logprob``, or `MIN_LOGPROB` for minus infinity."""
    return logprob if math.isfinite(logprob) else MIN_LOGPROB
