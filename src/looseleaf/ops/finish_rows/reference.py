"""The states of a row and the state of its private item, merged."""

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.merge_states.reference import merge_states_reference
from looseleaf.ops.partial_attention.work_list import WorkList
from looseleaf.ops.rotate.reference import rotate_wide
from looseleaf.ops.scores.reference import gather_pages, run_positions, score, softmax_state
from looseleaf.types import AttnState, Rotation, ScoreRule


def finish_rows_reference(
    states: AttnState,
    q: Float[Tensor, "rows qo_heads head_dim"],
    pages: tuple[Tensor, Tensor],
    work: WorkList,
    rotation: Rotation,
    rule: ScoreRule,
    out: Float[Tensor, "rows qo_heads head_dim"],
) -> AttnState:
    """See `looseleaf.ops.finish_rows`."""
    assert work.row_own is not None
    dtype = torch.promote_types(q.dtype, torch.float32)
    own_out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    own_lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    page_size = pages[0].shape[2]
    for row, (first, slots, offset, bound) in enumerate(work.row_own.view(-1, 4).tolist()):
        if not slots:
            continue
        run = slice(first, first + slots // page_size)
        pages_read = work.page_indices[run].long()
        positions = run_positions(work.page_positions[run], page_size)
        frame_position = work.row_positions[row : row + 1] - offset
        rotated = rotate_wide(q[row : row + 1], frame_position.clamp_min(0), rotation)
        distance, visible = frame_position[:, None] - positions, (positions < bound)[None]
        k, v = (gather_pages(side, pages_read) for side in pages)
        state = softmax_state(score(rotated, k, distance, visible, rule), v)
        own_out[row], own_lse[row] = state.out[0].to(dtype), state.lse[0].to(dtype)
    return merge_states_reference(states, work.row_state_indptr, AttnState(own_out, own_lse), out)
