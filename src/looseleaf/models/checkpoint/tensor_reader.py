"""The reader of a checkpoint's tensors; ``weights.py`` has the implementations."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from looseleaf.config import ModelConfig
from looseleaf.models.layers import Norm
from looseleaf.models.linear import Projection
from looseleaf.models.quantized import QuantizedWeight


@runtime_checkable
class TensorReader(Protocol):
    """Reads or checks tensors by name; see ``weights.py``."""

    def __contains__(self, name: str) -> bool: ...

    def expert_matrix(
        self, names: list[str], features: int, fan_in: int
    ) -> Tensor | QuantizedWeight: ...

    def fused(
        self, names: list[str], shapes: list[tuple[int, ...]], wide: bool = False
    ) -> Tensor: ...

    def matrix(
        self, names: list[str], sizes: list[int], fan_in: int
    ) -> Tensor | QuantizedWeight: ...

    def norm(self, name: str, size: int, config: ModelConfig) -> Norm: ...

    def projection(
        self, names: list[str], sizes: list[int], fan_in: int, bias: bool
    ) -> Projection: ...

    def narrow(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight: ...

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The uint8 tensor ``name``, on the CPU."""
        ...

    def mxfp4(self, codes: Tensor, scales: Tensor) -> Tensor | QuantizedWeight:
        """Experts in MXFP4: in their bits where products read them, else their values."""
        ...

    def router(self, weight: Tensor) -> Tensor:
        """``weight`` (fp32) in the dtype and layout of the device's router."""
        ...
