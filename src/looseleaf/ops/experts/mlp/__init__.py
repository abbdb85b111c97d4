"""The gated MLPs of a mixture of experts, one launch per product for all experts.

A program multiplies a tile of rows of one expert with some outputs of its matrix. Few rows are
bound by the read of the matrices, so the matrix is the first operand and tiles of rows are small:
an expert with one row reads its matrix once and computes few rows that don't exist. Up to four rows
per expert multiply MXFP4 without tensor cores (`looseleaf.ops.experts.mlp.vectors`)."""

from jaxtyping import Float
from torch import Tensor

from looseleaf.ops.dense.scaled_linear import ScaledMatrix
from looseleaf.ops.dense.scaled_linear.reference import dequantize_reference
from looseleaf.ops.dispatch import Implementation, choose
from looseleaf.ops.experts.mlp.activation import Activation, ClampedSwiglu
from looseleaf.ops.experts.mlp.mxfp4 import Mxfp4Matrix
from looseleaf.ops.experts.mlp.reference import expert_mlp_reference
from looseleaf.ops.experts.mlp.vectors import MOST, few_tile
from looseleaf.ops.experts.route import Routes

__all__ = [
    "FEW_ROWS",
    "Activation",
    "ClampedSwiglu",
    "Mxfp4Matrix",
    "Stacked",
    "expert_mlp",
    "rows_of_kernels",
    "shape_of",
    "tile_rows",
]

Stacked = Tensor | ScaledMatrix | Mxfp4Matrix
"""The matrices of all experts, one below the other."""

FEW_ROWS = 64
"""Most rows whose summands are fp32."""

# (most rows per expert on average, rows of a tile)
_TILES = ((8, 16), (24, 32), (96, 64))
_MOST_ROWS = 128


def tile_rows(pairs: int, num_experts: int) -> int:
    """Rows of a tile for this number of pairs of a row and an expert."""
    average = pairs / num_experts
    return next((tile for most, tile in _TILES if average <= most), _MOST_ROWS)


def shape_of(matrix: Stacked) -> tuple[int, int]:
    """Features and columns."""
    if isinstance(matrix, ScaledMatrix | Mxfp4Matrix):
        return matrix.features, matrix.columns
    return matrix.shape[0], matrix.shape[1]


def rows_of_kernels(slots: int, num_experts: int) -> list[int]:
    """Numbers of rows that launch all kernels of a layer."""
    last = [int(most * num_experts / slots) for most in (*MOST, *(most for most, _ in _TILES))]
    return sorted({1, FEW_ROWS, FEW_ROWS + 1, *(n for n in last if n), last[-1] + num_experts})


def expert_mlp(
    x: Float[Tensor, "rows hidden"],
    gate_up: Stacked,
    down: Stacked,
    routes: Routes,
    implementation: Implementation = "auto",
    *,
    activation: Activation = "silu",
    gate_up_bias: Float[Tensor, " all_gates"] | None = None,
    down_bias: Float[Tensor, " all_outputs"] | None = None,
) -> Float[Tensor, "parts rows hidden"]:
    """Summands of the sum over a row's experts of ``weight * down(activation(gate) * up)``.

    ``gate_up [num_experts * 2 * inner, hidden]`` has gate and up of each expert, one expert below
    the other; ``down [num_experts * hidden, inner]`` likewise. Codes have whole tiles of
    `looseleaf.ops.dense.scaled_linear`. The kernel reads MXFP4 with rows of 16 bits.

    A `ClampedSwiglu` takes the place of ``activation(gate) * up``. Biases are fp32. Summands are
    fp32 for up to `FEW_ROWS` rows, else in the dtype of ``x``. Raises InvalidOption for an unknown
    ``implementation``, and for MXFP4 with rows of 32 bits in the kernel."""
    num_experts = shape_of(down)[0] // x.shape[1]
    biases = gate_up_bias, down_bias
    if choose(implementation, x) == "triton":
        few = few_tile(routes.experts.numel(), num_experts)
        if few and isinstance(gate_up, Mxfp4Matrix) and isinstance(down, Mxfp4Matrix):
            from looseleaf.ops.experts.mlp.vectors.kernel import expert_vectors_triton, takes

            if takes(x):
                both = gate_up, down
                return expert_vectors_triton(x, both, routes, num_experts, activation, biases, few)
        from looseleaf.ops.experts.mlp.kernel import expert_mlp_triton

        return expert_mlp_triton(x, gate_up, down, routes, num_experts, activation, biases)
    plain = _values(gate_up), _values(down)
    return expert_mlp_reference(x, *plain, routes, activation, biases)[None]


def _values(matrix: Stacked) -> Tensor:
    if isinstance(matrix, Mxfp4Matrix):
        return matrix.dequantize()
    return matrix if isinstance(matrix, Tensor) else dequantize_reference(matrix)
