"""The equations of `looseleaf.ops.experts.route`."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.config import ExpertConfig


def route_reference(
    logits: Float[Tensor, "*parts rows logits"],
    law: ExpertConfig,
    selection_bias: Float[Tensor, " experts"] | None = None,
) -> tuple[Int[Tensor, "rows slots"], Float[Tensor, "rows slots"]]:
    """The best ``top_k`` scores among the best groups, and shared experts."""
    wide = logits.float() if logits.ndim == 2 else logits.float().sum(0)
    routed = wide[:, : law.num_experts]
    scores = routed.softmax(1) if law.scoring == "softmax" else routed.sigmoid()
    ranked = scores if selection_bias is None else scores + selection_bias
    if law.num_groups > 1:
        ranked = _in_best_groups(ranked, law)
    # a stable sort: of equal scores the first expert wins
    chosen = ranked.argsort(dim=1, descending=True, stable=True)[:, : law.top_k]
    weights = scores.gather(1, chosen)
    if law.normalized:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    weights = weights * law.scaling
    if law.num_shared:
        chosen, weights = _with_shared(chosen, weights, wide, law)
    return chosen.to(torch.int32), weights


def _in_best_groups(ranked: Tensor, law: ExpertConfig) -> Tensor:
    """``ranked``, and -inf outside of each row's best groups."""
    grouped = ranked.unflatten(1, (law.num_groups, -1))
    group_scores = grouped.topk(law.group_scores, 2).values.sum(2)
    best = group_scores.argsort(dim=1, descending=True, stable=True)[:, : law.top_groups]
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    inside: Tensor = grouped.masked_fill(outside[:, :, None], -torch.inf)
    return inside.flatten(1)


def _with_shared(
    chosen: Tensor, weights: Tensor, logits: Tensor, law: ExpertConfig
) -> tuple[Tensor, Tensor]:
    rows, device = len(chosen), chosen.device
    shared = torch.arange(law.num_experts, law.num_stored, device=device).expand(rows, -1)
    gate = torch.ones(rows, 1, device=device)
    if law.shared_gate:
        gate = logits[:, law.num_experts, None].sigmoid()
    return torch.cat([chosen, shared], 1), torch.cat([weights, gate.expand_as(shared)], 1)
