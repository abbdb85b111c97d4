"""Log-probabilities of drawn tokens and of the likeliest tokens."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


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
    logprobs = logits.float().log_softmax(-1)
    drawn = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > drawn).sum(-1) + 1
    top = logprobs.topk(min(max(num_top), logits.shape[-1]))
    rows = zip(
        token_ids.tolist(),
        drawn[:, 0].tolist(),
        ranks.tolist(),
        top.indices.tolist(),
        top.values.tolist(),
        num_top,
        strict=True,
    )
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
