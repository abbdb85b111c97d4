"""Page scores, row by row."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.rotate.reference import rotate_wide
from looseleaf.ops.select_pages.candidate_list import CandidateList
from looseleaf.types import Rotation, ScoreRule


class LayerRules(NamedTuple):
    """Rotation and score rule of a layer, and the page size."""

    rotation: Rotation
    rule: ScoreRule
    page_size: int


def page_scores_reference(
    q: Float[Tensor, "query_rows qo_heads head_dim"],
    vectors: Float[Tensor, "pages kv_heads width"],
    candidates: CandidateList,
    row_positions: Int[Tensor, " query_rows"],
    rules: LayerRules,
) -> Float[Tensor, "rows kv_heads most"]:
    """See `looseleaf.ops.page_scores`."""
    rotation, rule, page_size = rules
    _, heads, width = vectors.shape
    scores = torch.zeros(*candidates.pages.shape[:1], heads, candidates.pages.shape[1])
    scores = scores.to(q.device)
    for row in range(int(candidates.num_rows[0])):
        count = int(candidates.num_pages[row])
        query_row, spans = candidates.row[row].long(), candidates.spans[row, :count].long()
        frame_positions = row_positions[query_row] - candidates.span_offset[row]
        queries = q[query_row].expand(len(frame_positions), *q.shape[1:])
        rotated = rotate_wide(
            queries, frame_positions.clamp_min(0), rotation
        ).float()  # [spans, qo_heads, head_dim]
        if width == 2 * q.shape[2]:
            rotated = torch.cat([rotated.clamp_min(0), rotated.clamp_max(0)], -1)
        query = rotated.unflatten(1, (heads, -1))[spans]  # [pages, kv_heads, group, width]
        summaries = vectors[candidates.pages[row, :count].long()].float()
        row_scores = (query * summaries[:, :, None]).sum(-1).amax(-1).T * rule.softmax_scale
        ordinal = torch.arange(count, device=q.device)
        is_forced = (ordinal < candidates.sink) | (ordinal >= candidates.first_recent[row])
        row_scores = row_scores.masked_fill(is_forced, torch.inf)
        if rule.window:
            last = candidates.starts[row, :count] + page_size - 1
            row_scores = row_scores.masked_fill(
                frame_positions[spans] - last >= rule.window, -torch.inf
            )
        scores[row, :, :count] = row_scores
    return scores
