"""Minimal work of a step in the products of layers: bytes of matrices, and products of weights."""

from collections.abc import Sequence
from typing import NamedTuple

from looseleaf.config import ModelConfig
from looseleaf.models.layers import LayerWeights


class LayerWork(NamedTuple):
    """Bytes of the matrices that a step reads, and products of a weight and a number."""

    num_bytes: float
    products: float


def layer_work(layers: Sequence[LayerWeights], config: ModelConfig, rows: int) -> LayerWork:
    """The work of ``rows`` rows in all ``layers``.

    A mixture reads its router and the experts that rows hit if they choose evenly."""
    num_bytes = products = 0.0
    for layer in layers:
        always = [layer.qkv.weight, layer.output.weight]
        experts = [layer.gate_up.weight, layer.down.weight]
        read, used = 1.0, 1.0
        if layer.router is not None and config.experts is not None:
            law = config.experts
            always.append(layer.router.weight)
            hit = law.num_experts * (1 - (1 - law.top_k / law.num_experts) ** rows)
            read = (hit + law.num_shared) / law.num_stored
            used = law.num_slots / law.num_stored
        num_bytes += sum(w.nbytes for w in always) + read * sum(w.nbytes for w in experts)
        weights = sum(w.numel() for w in always) + used * sum(w.numel() for w in experts)
        products += rows * weights
    return LayerWork(num_bytes, products)
