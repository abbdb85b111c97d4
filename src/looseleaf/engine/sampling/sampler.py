"""A step's tokens from its logits, in vLLM's order.

The order is: bias and forbidden ends, penalties, grammar, temperature, min-p, top-k, top-p, draw.
A batch of plain greedy rows costs one argmax. Filters give a threshold per row, and lower logits
are removed, so tokens of equal probability are treated alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.engine.sampling.state import Option, SamplingBatch
from looseleaf.ops.dense.likeliest import likeliest


class TokenLogprob(NamedTuple):
    """A token's log-probability under the model, and its rank, 1 for the likeliest."""

    token_id: int
    logprob: float
    rank: int


def gather_logprobs(
    logits: Float[Tensor, "rows vocab"], token_ids: Int[Tensor, "rows"], num_top: list[int]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """For each row the drawn token first, then the ``num_top`` likeliest in falling order.

    ``logits`` are the model's own, before penalties, temperature and filters. The drawn token is
    not repeated among the likeliest.
    """
    return entries_of(token_ids.tolist(), top_logprobs(logits, token_ids, max(num_top)), num_top)


def top_logprobs(
    logits: Float[Tensor, "rows vocab"], token_ids: Int[Tensor, "rows"], num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores on the device of ``logits``: log-probabilities ``[rows]`` and ranks ``[rows]`` of
    ``token_ids``, then ids and log-probabilities ``[rows, num_top]`` of the likeliest tokens."""
    logprobs = logits.float().log_softmax(-1)
    drawn = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > drawn).sum(-1) + 1
    top = logprobs.topk(min(num_top, logits.shape[-1]))
    return drawn[:, 0], ranks, top.indices, top.values


def entries_of(
    token_ids: Sequence[int], scores: tuple[Tensor, Tensor, Tensor, Tensor], num_top: Sequence[int]
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """The entries of `gather_logprobs` from the scores of `top_logprobs`."""
    columns = (column.tolist() for column in scores)
    rows = zip(token_ids, *columns, num_top, strict=True)
    return tuple(
        (
            TokenLogprob(drawn_id, logprob, rank),
            *(
                TokenLogprob(token_id, value, top_rank)
                for top_rank, (token_id, value) in enumerate(
                    zip(ids[:k], values[:k], strict=True), 1
                )
                if token_id != drawn_id
            ),
        )
        for drawn_id, logprob, rank, ids, values, k in rows
    )


class SampledTokens(NamedTuple):
    """A step's tokens: ``token_ids`` int64 ``[rows]``, on the device of the logits.

    ``logprobs`` has an entry for each row that requests them: the drawn token, then the likeliest.
    """

    token_ids: Tensor
    logprobs: Mapping[int, tuple[TokenLogprob, ...]]


@dataclass(frozen=True)
class Sampler:
    """Draws tokens. Top-p sorts ``num_candidates`` logits per row, and all if necessary."""

    num_candidates: int = 1024

    def sample(self, logits: Float[Tensor, "rows vocab"], batch: SamplingBatch) -> SampledTokens:
        """The next token of every row, recorded in the states of ``batch``.

        A row's token depends on its logits, its state and its seed, not on other rows.
        """
        if batch.plain_greedy:
            return SampledTokens(likeliest(logits) if logits.is_cuda else logits.argmax(-1), {})
        adjusted = _adjusted(logits, batch)
        token_ids = adjusted.argmax(-1)
        if batch.random:
            token_ids[batch.random_rows] = self._draw(adjusted[batch.random_rows], batch)
        logprobs = _logprobs(logits, token_ids, batch)
        # last, so an exception leaves all states unchanged
        batch.record(token_ids)
        return SampledTokens(token_ids, logprobs)

    def _draw(
        self, logits: Float[Tensor, "drawn vocab"], batch: SamplingBatch
    ) -> Int[Tensor, "drawn"]:
        """Filter and draw, by inverting the cumulative distribution. Overwrites ``logits``."""
        assert batch.temperature is not None, "a random row has a temperature"
        logits /= batch.temperature.values
        _apply_filter(logits, batch.min_p, min_p_threshold)
        _apply_filter(logits, batch.top_k, top_k_threshold)
        _apply_filter(
            logits, batch.top_p, lambda x, top_p: top_p_threshold(x, top_p, self.num_candidates)
        )
        weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        # the first token whose cumulative weight exceeds the point; its weight is not zero
        points = batch.draws() * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, points, right=True)[:, 0]
        return drawn.clamp_max(logits.shape[-1] - 1)


def _adjusted(
    logits: Float[Tensor, "rows vocab"], batch: SamplingBatch
) -> Float[Tensor, "rows vocab"]:
    """An fp32 copy with biases, forbidden ends, penalties and grammar masks applied."""
    adjusted = logits.to(torch.float32, copy=True)
    if batch.bias is not None:
        rows, token_ids, values = batch.bias
        adjusted.index_put_((rows, token_ids), values, accumulate=True)
    rows_of_ends, ends = batch.forbidden()
    if ends:
        adjusted[rows_of_ends, ends] = -torch.inf
    for i in batch.penalized:
        adjusted[i] = batch.states[i].penalized(adjusted[i])
    for i in batch.constrained:
        allowed = batch.states[i].allowed()
        if allowed is not None:
            adjusted[i].masked_fill_(~allowed.to(adjusted.device), -torch.inf)
    return adjusted


def _apply_filter(
    logits: Float[Tensor, "drawn vocab"],
    option: Option | None,
    threshold: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Mask, in place, logits below the threshold in the rows that use the option."""
    if option is not None:
        used = logits[option.rows]
        below = used < threshold(used, option.values)
        logits[option.rows] = used.masked_fill(below, -torch.inf)


def _logprobs(
    logits: Float[Tensor, "rows vocab"], token_ids: Int[Tensor, "rows"], batch: SamplingBatch
) -> dict[int, tuple[TokenLogprob, ...]]:
    if not batch.num_logprobs:
        return {}
    rows = list(batch.num_logprobs)
    gathered = gather_logprobs(logits[rows], token_ids[rows], list(batch.num_logprobs.values()))
    return dict(zip(rows, gathered, strict=True))


Column = Float[Tensor, "rows 1"]


def min_p_threshold(logits: Float[Tensor, "rows vocab"], min_p: Column) -> Column:
    """The logit of a token ``min_p`` times as likely as the likeliest one."""
    return logits.amax(-1, keepdim=True) + min_p.log()


def top_k_threshold(logits: Float[Tensor, "rows vocab"], top_k: Int[Tensor, "rows 1"]) -> Column:
    """The ``top_k``-th largest logit, the smallest logit if there are fewer."""
    largest = logits.topk(min(int(top_k.max()), logits.shape[-1])).values
    return largest.gather(-1, top_k.clamp_max(largest.shape[-1]) - 1)


def top_p_threshold(
    logits: Float[Tensor, "rows vocab"], top_p: Column, num_candidates: int
) -> Column:
    """The smallest logit with less than ``top_p`` of the mass before it, in falling order.

    Sorts the ``num_candidates`` largest logits, and all if their mass is below ``top_p``.
    """
    mass = logits.logsumexp(-1, keepdim=True)
    largest = logits.topk(min(num_candidates, logits.shape[-1])).values
    kept = _num_kept(largest, mass, top_p)
    if largest.shape[-1] < logits.shape[-1] and bool((kept == largest.shape[-1]).any()):
        largest = logits.sort(dim=-1, descending=True).values
        kept = _num_kept(largest, mass, top_p)
    return largest.gather(-1, kept - 1)


def _num_kept(
    descending: Float[Tensor, "rows candidates"], mass: Column, top_p: Column
) -> Int[Tensor, "rows 1"]:
    probabilities = (descending - mass).double().exp()
    before = probabilities.cumsum(-1) - probabilities
    # rounding may put mass before the first
    return (before < top_p).sum(-1, keepdim=True).clamp_min(1)
