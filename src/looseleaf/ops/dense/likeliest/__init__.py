"""The likeliest token of every row: all that greedy decoding asks of its logits."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.dense.likeliest.reference import likeliest_reference
from looseleaf.ops.dispatch import Implementation, choose


def likeliest(
    logits: Float[Tensor, "rows vocab"], implementation: Implementation = "auto"
) -> Int[Tensor, " rows"]:
    """The first of the largest logits of every row, int64; of a row with NaN some token. Rows are
    contiguous."""
    if choose(implementation, logits) == "triton":
        from looseleaf.ops.dense.likeliest.kernel import likeliest_triton

        return likeliest_triton(logits)
    return likeliest_reference(logits)
