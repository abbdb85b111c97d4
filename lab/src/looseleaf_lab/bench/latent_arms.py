"""Arms of ``bench attention`` for prompts over latent keys.

One arm reads latents, with the maps of its queries and outputs; the other reads expanded keys, with
the expansion."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from looseleaf.attention.expanded import ExpandingStep, expanded_rows
from looseleaf.attention.plan.groups import Groups
from looseleaf.attention.select.layer_reads import StepReads
from looseleaf.config import LatentConfig
from looseleaf.models.latent import attend_latents
from looseleaf.models.layers import LatentWeights, Norm
from looseleaf.types import Attend, Rotation, ScoreRule
from looseleaf_lab.bench.attention_cases import AttentionShape, Case
from looseleaf_lab.errors import BenchmarkRefused

MAPPED, EXPANDED = "latents, with the maps of rows", "expanded keys"
# more than the difference of two correct 16-bit paths
_TOLERANCE = 0.03
Arm = Callable[[], object]


def latent_flops(shape: AttentionShape, case: Case, arm: str) -> int:
    """The products of an arm, each as two operations, over all heads."""
    latent = shape.latent
    assert latent is not None, "only of latent keys"
    maps = latent.rank * (latent.nope_dim + latent.value_dim)
    if arm == MAPPED:
        return case.pairs() * shape.flops_per_pair + 2 * shape.num_qo_heads * case.num_rows * maps
    keys = sum(int(chunk.positions[-1]) + 1 for chunk in case.chunks)
    pair = latent.query_dim + latent.value_dim
    return 2 * shape.num_qo_heads * (case.pairs() * pair + keys * maps)


def latent_arms(
    shape: AttentionShape,
    case: Case,
    pools: Sequence[Tensor],
    latents: Attend,
    rotation: Rotation,
    rule: ScoreRule,
) -> dict[str, Arm]:
    """Both arms over every pool, for a case of chunks only; ``latents`` is attention over stored
    keys. No arm without a form for expanded keys. Raises BenchmarkRefused if answers differ."""
    latent, device = shape.latent, pools[0].device
    assert latent is not None, "only of latent keys"
    expanded = expanded_rows(case.chunks, shape.page_size, device, len(pools))
    if expanded is None:
        return {}
    weights = _random_weights(latent, shape, device)
    size = case.num_rows, shape.num_qo_heads, latent.query_dim
    q = torch.randn(size, device=device).to(shape.dtype)
    k = q.new_zeros(0, 1, latent.key_dim)
    step = ExpandingStep(
        lambda layer, q, k, v: q.new_zeros(0, *q.shape[1:]),
        StepReads(Groups([], [])),
        expanded,
        lambda layer: (pools[layer][0], pools[layer][0]),
        (rotation,) * len(pools),
        (rule,) * len(pools),
        "auto",
    )

    def arm(attend: Attend) -> Callable[[], list[Tensor]]:
        layers = range(len(pools))
        return lambda: [attend_latents(attend, n, q, k, weights, latent) for n in layers]

    arms = {MAPPED: arm(latents), EXPANDED: arm(step)}
    first, second = (each()[0].double() for each in arms.values())
    difference = float((first - second).norm() / first.norm())
    if not difference < _TOLERANCE:
        raise BenchmarkRefused(
            f"{case.name}: rows over expanded keys and over latents differ by {difference:.2g}"
        )
    return {**arms}


def _random_weights(
    latent: LatentConfig, shape: AttentionShape, device: torch.device
) -> LatentWeights:
    def normal(*size: int) -> Tensor:
        values = torch.randn(size, device=device) * math.sqrt(1 / latent.rank)
        return values.to(shape.dtype)

    heads = shape.num_qo_heads
    return LatentWeights(
        Norm(normal(latent.rank)),
        normal(heads, latent.nope_dim, latent.rank),
        normal(heads, latent.rank, latent.value_dim),
    )
