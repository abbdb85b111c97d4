"""A step's tokens from its logits, in vLLM's order.

The order is: bias and forbidden ends, penalties, grammar, temperature, min-p, top-k, top-p, draw.
A batch of plain greedy rows costs one argmax.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.engine.sampling.batch import Option, SamplingBatch
from looseleaf.engine.sampling.filters import min_p_threshold, top_k_threshold, top_p_threshold
from looseleaf.engine.sampling.logprobs import TokenLogprob, gather_logprobs
from looseleaf.ops.dense.likeliest import likeliest


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
        adjusted[i].masked_fill_(~batch.states[i].allowed().to(adjusted.device), -torch.inf)
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
