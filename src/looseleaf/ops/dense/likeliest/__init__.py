"""The argmax of every row of logits, for greedy decoding."""

from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.ops.dense.likeliest.reference import likeliest_reference
from looseleaf.ops.dispatch import Implementation, choose


def likeliest(
    logits: Float[Tensor, "rows vocab"], implementation: Implementation = "auto"
) -> Int[Tensor, " rows"]:
    """Index of the first largest logit of every row, int64 ``[rows]``.

    Rows are contiguous. A row with a NaN gets an arbitrary token. Raises InvalidOption for an
    unknown ``implementation``."""
    if choose(implementation, logits) == "triton":
        from looseleaf.ops.dense.likeliest.kernel import likeliest_triton

        return likeliest_triton(logits)
    return likeliest_reference(logits)
