"""The router of a mixture of experts: from a row's logits to its experts and their weights.

The laws are those of Mixtral (arXiv 2401.04088), Qwen3, OLMoE (arXiv 2409.02060), and DeepSeek V3
(arXiv 2412.19437) with its groups and its bias for the choice."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.config import ExpertConfig
from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.experts.route.reference import route_reference


class Routes(NamedTuple):
    """Each row's experts (int32) and their weights (fp32), ``[rows, slots]``.

    The last ``num_shared`` slots are the shared experts."""

    experts: Int[Tensor, "rows slots"]
    weights: Float[Tensor, "rows slots"]


def route(
    logits: Float[Tensor, "*parts rows logits"],
    law: ExpertConfig,
    selection_bias: Float[Tensor, " experts"] | None = None,
    implementation: Implementation = "auto",
) -> Routes:
    """The experts of each row, by the router's law, in fp32.

    ``logits`` have a column per expert, then one of the shared experts' gate if the law has one;
    further columns are ignored. A leading dim of parts is summed. Of equal scores the first expert
    wins. Raises InvalidOption for an unknown ``implementation``."""
    if choose(implementation, logits) == "triton":
        from looseleaf.ops.experts.route.kernel import route_triton

        return Routes(*route_triton(logits, law, selection_bias))
    return Routes(*route_reference(logits, law, selection_bias))
