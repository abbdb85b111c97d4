"""The attention that tokens receive from rows that stand in later parts of the same request.

Attention inside a document was there when it was encoded. Only what crosses a border is new; the
question's attention and the links between documents are both of this kind.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.candidates import Candidates
from looseleaf.ops.scores.reference import score
from looseleaf.types import ScoreRule

_ROWS = 16  # rows whose weights are held at a time: rows x heads x tokens floats


@dataclass(frozen=True)
class Readers:
    """Rows whose attention counts, with the log-sum-exp over *all* keys that they saw.

    ``documents`` numbers the part each row stands in, as in ``Candidates``. ``weight`` says how
    much a row matters, 0 to 1; 1 for a request's own text."""

    queries: Float[Tensor, "rows qo_heads head_dim"]
    lse: Float[Tensor, "rows qo_heads"]
    positions: Int[Tensor, " rows"]
    documents: Int[Tensor, " rows"]
    requests: Int[Tensor, " rows"]
    weight: Float[Tensor, " rows"]


def attention_received(
    readers: Readers,
    keys: Float[Tensor, "tokens kv_heads head_dim"],
    candidates: Candidates,
    rule: ScoreRule,
) -> Float[Tensor, " tokens"]:
    """The largest weight times importance that each candidate gets from any reader and head, fp32.

    Queries and keys stand in one frame. A reader counts for candidates of earlier parts of its own
    request only; a candidate that nobody reads gets 0."""
    best = torch.zeros(len(candidates), dtype=torch.float32, device=keys.device)
    by_head, requests = keys.float().transpose(0, 1), candidates.requests
    for start in range(0, len(readers.positions), _ROWS):
        rows = slice(start, start + _ROWS)
        distance = readers.positions[rows, None] - candidates.positions
        visible = readers.requests[rows, None] == requests
        visible &= candidates.documents < readers.documents[rows, None]
        if rule.window:
            visible &= distance < rule.window
        scores = score(readers.queries[rows].float(), by_head, distance, visible, rule)
        # a row that saw no key has a log-sum-exp of -inf and only hidden keys here
        pivot = readers.lse[rows].float().masked_fill(readers.lse[rows] == -torch.inf, 0.0)
        weight = (scores - pivot[..., None]).exp() * readers.weight[rows, None, None]
        best = torch.maximum(best, weight.amax((0, 1)))
    return best
