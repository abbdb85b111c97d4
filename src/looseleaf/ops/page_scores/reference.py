"""Page scores, row by row."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.rotate.reference import turn
from looseleaf.ops.select_pages.candidate_list import CandidateList
from looseleaf.types import Rotation, ScoreRule


def page_scores_reference(
    q: Float[Tensor, "query_rows qo_heads head_dim"],
    vectors: Float[Tensor, "pages kv_heads width"],
    candidates: CandidateList,
    row_positions: Int[Tensor, " query_rows"],
    how: tuple[Rotation, ScoreRule, int],
) -> Float[Tensor, "rows kv_heads most"]:
    """See `looseleaf.ops.page_scores`."""
    rotation, rule, page_size = how
    _, heads, width = vectors.shape
    scores = torch.zeros(*candidates.pages.shape[:1], heads, candidates.pages.shape[1])
    scores = scores.to(q.device)
    for row in range(int(candidates.num_rows[0])):
        count = int(candidates.num_pages[row])
        query_row, spans = candidates.row[row].long(), candidates.spans[row, :count].long()
        at = row_positions[query_row] - candidates.span_offset[row]
        each = q[query_row].expand(len(at), *q.shape[1:])
        turned = turn(each, at.clamp_min(0), rotation).float()  # [spans, qo_heads, head_dim]
        if width == 2 * q.shape[2]:
            turned = torch.cat([turned.clamp_min(0), turned.clamp_max(0)], -1)
        wanted = turned.unflatten(1, (heads, -1))[spans]  # [pages, kv_heads, group, width]
        kept = vectors[candidates.pages[row, :count].long()].float()
        mine = (wanted * kept[:, :, None]).sum(-1).amax(-1).T * rule.softmax_scale
        ordinal = torch.arange(count, device=q.device)
        forced = (ordinal < candidates.sink) | (ordinal >= candidates.first_recent[row])
        mine = mine.masked_fill(forced, torch.inf)
        if rule.window:
            last = candidates.starts[row, :count] + page_size - 1
            mine = mine.masked_fill(at[spans] - last >= rule.window, -torch.inf)
        scores[row, :, :count] = mine
    return scores
