"""The log-sum-exp merge as its equation, for all rows with the same number of states together."""

from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
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
    rows = len(indptr) - 1
    if carried is not None and len(carried.lse) < rows:
        raise InvalidOption(
            f"{rows} rows carry {len(carried.lse)} states: give one per row, (0, -inf) if empty"
        )
    if kept is not None:
        states, indptr = _keep(AttnState(states.out.to(dtype), states.lse), indptr, kept)
    rows_of: dict[int, list[int]] = {}
    for r, (start, stop) in enumerate(pairwise(indptr)):
        rows_of.setdefault(stop - start, []).append(r)
    if len(rows_of) != 1:
        merged = states.out.new_empty((rows, *states.out.shape[1:]), dtype=dtype)
        lse = states.lse.new_empty((rows, *states.lse.shape[1:]))
    for count, rows_with_count in rows_of.items():
        each_out, each_lse = _gather_states(states, indptr, rows_with_count, count)
        if carried is not None:
            each_out = torch.cat(
                [each_out, carried.out[rows_with_count, None].to(each_out.dtype)], 1
            )
            each_lse = torch.cat(
                [each_lse, carried.lse[rows_with_count, None].to(each_lse.dtype)], 1
            )
        group = _merge_stack(each_out.to(dtype), each_lse)
        if len(rows_with_count) == rows:
            merged, lse = group
        else:
            merged[rows_with_count], lse[rows_with_count] = group
    if out is None:
        return AttnState(merged.to(states.out.dtype), lse)
    out.copy_(merged)
    return AttnState(out, lse)


def _gather_states(
    states: AttnState, indptr: list[int], rows: list[int], count: int
) -> tuple[Float[Tensor, "rows count heads head_dim"], Float[Tensor, "rows count heads"]]:
    """The ``count`` states of each of ``rows``; a view if these are all rows."""
    shape = len(rows), count
    if len(rows) == len(indptr) - 1:
        run = slice(indptr[0], indptr[-1])
        return states.out[run].unflatten(0, shape), states.lse[run].unflatten(0, shape)
    indices = [indptr[r] + n for r in rows for n in range(count)]
    index = torch.tensor(indices, dtype=torch.int64, device=states.lse.device)
    return states.out[index].unflatten(0, shape), states.lse[index].unflatten(0, shape)


def _merge_stack(
    out: Float[Tensor, "rows count heads head_dim"], lse: Float[Tensor, "rows count heads"]
) -> tuple[Float[Tensor, "rows heads head_dim"], Float[Tensor, "rows heads"]]:
    if out.shape[1] == 0:
        return out.sum(1), lse.new_full(lse.sum(1).shape, -torch.inf)
    lse_max = lse.amax(1)
    # a head without keys has an lse of -inf: a finite pivot keeps its weights 0, not NaN
    pivot = lse_max.masked_fill(lse_max == -torch.inf, 0.0)
    weight = (lse - pivot[:, None]).exp_()
    total = weight.sum(1)
    # the output of an empty state is undefined and may be NaN: its weight of 0 would not clear it
    filled = torch.where(lse[..., None] == -torch.inf, 0.0, out)
    merged = filled.mul_(weight[..., None]).sum(1).div_(total.clamp_min(1e-38)[..., None])
    return merged, pivot.add_(total.log())


def _keep(states: AttnState, indptr: list[int], kept: KeptStates) -> tuple[AttnState, list[int]]:
    """Merges each row's last states into its kept state.

    Returns the states of all rows, with the kept state in place of the last ones, and their indptr.
    """
    outs, lses, begins = [states.out[:0]], [states.lse[:0]], [0]
    for r, (start, stop) in enumerate(pairwise(indptr)):
        out, lse, slot = states.out[start:stop], states.lse[start:stop], int(kept.at[r])
        if slot >= 0:
            first, own_slot = int(kept.first[r]) - start, slice(slot, slot + 1)
            inputs = [out[first:]], [lse[first:]]
            if not int(kept.fresh[r]):
                inputs[0].append(kept.out[own_slot].to(out.dtype))
                inputs[1].append(kept.lse[own_slot].to(lse.dtype))
            merged = _merge_stack(torch.cat(inputs[0])[None], torch.cat(inputs[1])[None])
            kept.out[own_slot], kept.lse[own_slot] = merged
            out = torch.cat([out[:first], kept.out[own_slot].to(out.dtype)])
            lse = torch.cat([lse[:first], kept.lse[own_slot].to(lse.dtype)])
        outs.append(out)
        lses.append(lse)
        begins.append(begins[-1] + len(lse))
    return AttnState(torch.cat(outs), torch.cat(lses)), begins
