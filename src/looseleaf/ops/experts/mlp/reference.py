"""The equation of `looseleaf.ops.experts.mlp`."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from looseleaf.ops.experts.mlp.activation import Activation, ClampedSwiglu

if TYPE_CHECKING:
    from looseleaf.ops.experts.route import Routes

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_new": partial(functional.gelu, approximate="tanh"),
    }
)


def expert_mlp_reference(
    x: Float[Tensor, "rows hidden"],
    gate_up: Float[Tensor, "all_gates hidden"],
    down: Float[Tensor, "all_outputs inner"],
    routes: "Routes",
    activation: Activation,
    biases: tuple[Tensor | None, Tensor | None],
) -> Float[Tensor, "rows hidden"]:
    """The sum over a row's experts of ``weight * down(activation(gate) * up)``, in fp32 or fp64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    hidden, total = x.shape[1], x.new_zeros(x.shape, dtype=wide)
    num_experts = down.shape[0] // hidden
    gates, downs = (w.unflatten(0, (num_experts, -1)) for w in (gate_up, down))
    gate_bias, down_bias = (None if b is None else b.view(num_experts, -1) for b in biases)
    for expert in routes.experts.unique().tolist():
        rows, slots = (routes.experts == expert).nonzero(as_tuple=True)
        both = x[rows].to(wide) @ gates[expert].to(wide).T
        if gate_bias is not None:
            both = both + gate_bias[expert]
        gate, up = both.chunk(2, 1)
        if isinstance(activation, ClampedSwiglu):
            alpha, limit = activation
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = gate * torch.sigmoid(alpha * gate) * (up + 1)
        else:
            inner = _ACTIVATIONS[activation](gate) * up
        product = inner @ downs[expert].to(wide).T
        if down_bias is not None:
            product = product + down_bias[expert]
        total.index_add_(0, rows, product * routes.weights[rows, slots, None].to(wide))
    return total
