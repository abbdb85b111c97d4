"""The merge with ``(0, sink)`` as its equation."""

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.types import AttnState


def add_sinks_reference(state: AttnState, sinks: Float[Tensor, " qo_heads"]) -> AttnState:
    """See `looseleaf.ops.add_sinks`."""
    out, lse = state
    share = torch.sigmoid(lse - sinks)
    # the output of an empty state is undefined
    weighted = torch.where(lse[..., None] == -torch.inf, 0.0, out * share[..., None])
    out.copy_(weighted)
    lse.copy_(torch.logaddexp(lse, sinks.to(lse.dtype)))
    return state
