"""The log-sum-exp merge, written as its equation."""

from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.merge_states.kept import KeptStates
from looseleaf.types import AttnState


def merge_states_reference(
    states: AttnState,
    row_state_indptr: Int[Tensor, " rows_plus_one"],
    carried: AttnState | None = None,
    out: Float[Tensor, "rows heads head_dim"] | None = None,
    kept: KeptStates | None = None,
) -> AttnState:
    """See `looseleaf.ops.merge_states`."""
    dtype = torch.promote_types(states.out.dtype, torch.float32)
    indptr = row_state_indptr.tolist()
    rows = []
    for r, (start, stop) in enumerate(pairwise(indptr)):
        row_out, row_lse = states.out[start:stop].to(dtype), states.lse[start:stop]
        if carried is not None:
            row_out = torch.cat([row_out, carried.out[r : r + 1].to(dtype)])
            row_lse = torch.cat([row_lse, carried.lse[r : r + 1].to(row_lse.dtype)])
        if kept is not None and int(kept.at[r]) >= 0:
            row_out, row_lse = _kept(row_out, row_lse, int(kept.first[r]) - start, r, kept)
        rows.append(_merge_stack(row_out, row_lse))
    heads, head_dim = states.out.shape[1:]
    merged = (
        torch.stack([o for o, _ in rows]) if rows else states.out.new_zeros((0, heads, head_dim))
    )
    lse = torch.stack([s for _, s in rows]) if rows else states.lse.new_zeros((0, heads))
    if out is None:
        return AttnState(merged.to(states.out.dtype), lse)
    out.copy_(merged)
    return AttnState(out, lse)


def _kept(
    out: Float[Tensor, "states heads head_dim"],
    lse: Float[Tensor, "states heads"],
    first: int,
    row: int,
    kept: KeptStates,
) -> tuple[Tensor, Tensor]:
    """The states of a row, those from ``first`` on replaced by what it keeps of them."""
    place = int(kept.at[row])
    some_out, some_lse = out[first:], lse[first:]
    if not int(kept.fresh[row]):
        some_out = torch.cat([some_out, kept.out[place : place + 1].to(out.dtype)])
        some_lse = torch.cat([some_lse, kept.lse[place : place + 1].to(lse.dtype)])
    kept.out[place], kept.lse[place] = _merge_stack(some_out, some_lse)
    whole = torch.cat([out[:first], kept.out[place : place + 1].to(out.dtype)])
    return whole, torch.cat([lse[:first], kept.lse[place : place + 1].to(lse.dtype)])


def _merge_stack(
    out: Float[Tensor, "states heads head_dim"], lse: Float[Tensor, "states heads"]
) -> tuple[Float[Tensor, "heads head_dim"], Float[Tensor, " heads"]]:
    if out.shape[0] == 0:
        return out.new_zeros(out.shape[1:]), lse.new_full(lse.shape[1:], -torch.inf)
    lse_max = lse.amax(0)
    # a head may have no key in any set: a finite pivot keeps its weights 0, not NaN
    pivot = lse_max.masked_fill(lse_max == -torch.inf, 0.0)
    weight = (lse - pivot).exp()
    total = weight.sum(0)
    # an empty state's output may be anything, so its weight 0 must not meet a NaN
    kept = torch.where(lse[..., None] > -torch.inf, out, 0.0)
    merged = (weight[..., None] * kept).sum(0) / total.clamp_min(1e-38)[..., None]
    return merged, pivot + total.log()
