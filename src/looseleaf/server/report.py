"""What a request's answer says besides its text: usage, reuse, and log-probabilities."""

import math
from collections.abc import Sequence
from typing import Any

from looseleaf.engine.reports.outputs import LoadingReport, RequestOutput
from looseleaf.engine.sampling import TokenLogprob
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.retro import exposure_ratios
from looseleaf.server.policies import policies_in_force
from looseleaf.server.prompts import Label

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's own value."""


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """OpenAI's usage of one request with several prompts. ``cached_tokens`` are exact prefix hits
    only."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.reuse.text_tokens_cached for output in outputs)
        },
    }


def reuse(outputs: Sequence[RequestOutput], labels: Sequence[Sequence[Label]]) -> dict[str, Any]:
    """The ``looseleaf`` object of one request with several prompts: counts are sums, times are
    those of the slowest."""
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
        for number, (output, own) in enumerate(zip(outputs, labels, strict=True))
        for label, document in zip(own, output.reuse.documents, strict=False)
    ]
    reports = [output.reuse for output in outputs]
    paths = [output.attention for output in outputs]
    metrics = [output.metrics for output in outputs]
    return {
        "documents": documents,
        "text_tokens": sum(r.text_tokens for r in reports),
        "text_tokens_cached": sum(r.text_tokens_cached for r in reports),
        "document_tokens_reused": sum(r.document_tokens_reused for r in reports),
        "document_tokens_computed": sum(r.document_tokens_computed for r in reports),
        "document_tokens_recomputed": sum(r.document_tokens_recomputed for r in reports),
        "preempted_tokens": sum(r.preempted_tokens for r in reports),
        "loading": [_loading(r.loading) for r in reports if r.loading is not None],
        "policies": policies_in_force(outputs),
        "attention": {
            "decode_steps": sum(p.decode_steps for p in paths),
            "grouped_steps": sum(p.grouped_steps for p in paths),
            "keys_read": sum(p.keys_read for p in paths),
            "keys_shared": sum(p.keys_shared for p in paths),
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


def _selection(outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
    """What was read under a select policy, of all outputs; None if none has one."""
    reports = [output.select for output in outputs if output.select is not None]
    if not reports:
        return None
    pages, keys = ("pages_read", "pages_held"), ("keys_read", "keys_there")
    names = ("chosen_steps", "dense_steps", *pages, *keys, "bytes_read")
    measured = [(r.recall, r.recall_rows) for r in reports if r.recall is not None]
    rows = sum(count for _, count in measured)
    return {
        **{name: sum(getattr(r, name) for r in reports) for name in names},
        "recall": sum(recall * count for recall, count in measured) / rows if rows else None,
    }


def _revision(outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
    """The effective KV exposure over all outputs; None before the end, and without revision."""
    reports = [output.revision for output in outputs if output.revision is not None]
    if not reports:
        return None
    read = [sum(n) for n in zip(*(r.pages_read or r.keys_read for r in reports), strict=True)]
    return {"exposure": exposure_ratios(read)}


def _slowest(times: Sequence[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return max(known) if len(known) == len(times) else None


Entry = tuple[TokenLogprob, ...]
"""The token that was drawn, then the likeliest ones but for it."""


def chat_logprobs(entries: Sequence[Entry], top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Log-probabilities in the form of chat completions, ``top`` of the likeliest a token."""

    def shown(one: TokenLogprob) -> dict[str, Any]:
        content = tokenizer.token_bytes(one.token_id)
        return {
            "token": content.decode("utf-8", "replace"),
            "logprob": finite(one.logprob),
            "bytes": list(content),
        }

    content = [
        {**shown(entry[0]), "top_logprobs": [shown(one) for one in likeliest(entry, top)]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class TextOffsets:
    """Where in an output's text its tokens begin, token by token. The text of a token may be empty,
    come with a later one, or be held back, so that no sum of tokens' texts says it. The output
    continues the text of ``prompt``."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._detokenizer = tokenizer.stream()
        self._detokenizer.follow(prompt)
        self._length = 0

    def follow(self, entries: Sequence[Entry]) -> list[int]:
        """Where each of the next tokens begins."""
        offsets = []
        for entry in entries:
            offsets.append(self._length)
            self._length += len(self._detokenizer.push(entry[0].token_id))
        return offsets


def completion_logprobs(
    entries: Sequence[Entry], top: int, tokenizer: Tokenizer, offsets: TextOffsets
) -> dict[str, Any]:
    """Log-probabilities in the older form, as columns; ``offsets`` has followed the tokens before
    these."""

    def text(one: TokenLogprob) -> str:
        return tokenizer.token_bytes(one.token_id).decode("utf-8", "replace")

    def shown(entry: Entry) -> dict[str, float]:
        # the token that was drawn is always there, as the one more that OpenAI has
        ordered = [*reversed(likeliest(entry, top)), entry[0]]
        return {text(one): finite(one.logprob) for one in ordered}

    return {
        "tokens": [text(entry[0]) for entry in entries],
        "token_logprobs": [finite(entry[0].logprob) for entry in entries],
        "top_logprobs": [shown(entry) for entry in entries],
        "text_offset": offsets.follow(entries),
    }


def likeliest(entry: Entry, top: int) -> list[TokenLogprob]:
    """The ``top`` likeliest tokens, best first, whether the drawn one is among them or not."""
    return sorted(entry, key=lambda one: one.rank)[:top]


def finite(logprob: float) -> float:
    """``logprob``, or the least one if it is minus infinity."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
