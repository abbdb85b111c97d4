"""Bytes and floating-point work of a document's maps, for published shapes of hybrids.

Keys, values, maps and borders are counted in 16 bits, running states in 32."""

from dataclasses import dataclass
from typing import Literal

_KERNEL = 4
_STORED, _RUNNING = 2, 4
# of a card with 16 lanes of PCIe 5: pinned memory, and products of a prefill in 16 bits
_HOST_BYTES_PER_S, _WORK_PER_S = 50e9, 400e12


@dataclass(frozen=True)
class HybridShape:
    """Layers and heads of a hybrid.

    States are [rows, columns] in each of ``heads``. ``vectors`` heads have an own key: a delta
    rule shares keys among value heads, Mamba-2 shares input gates among all. ``active`` counts the
    parameters that a token reads, as published."""

    name: str
    kind: Literal["delta", "mamba"]
    linear_layers: int
    full_layers: int
    heads: int
    vectors: int
    rows: int
    columns: int
    kv_heads: int
    head_dim: int
    active: float

    @property
    def state_bytes(self) -> int:
        """The running state of one request."""
        return _RUNNING * self.linear_layers * self.heads * self.rows * self.columns

    @property
    def map_bytes(self) -> int:
        """A and B of one document, A dense with a delta rule and a number per head in Mamba-2."""
        transition = self.rows if self.kind == "delta" else 0
        values = self.heads * (self.rows * (self.columns + transition) + (transition == 0))
        return _STORED * self.linear_layers * values

    @property
    def border_bytes(self) -> int:
        """A document's first and last rows before the convolution, where borders are repaired.

        Without a repair only the last rows are stored, half of it."""
        if self.kind == "delta":
            channels = 2 * self.vectors * self.rows + self.heads * self.columns
        else:
            channels = self.heads * self.rows + 2 * self.vectors * self.columns
        return _STORED * self.linear_layers * 2 * (_KERNEL - 1) * channels

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in the full attention layers."""
        return _STORED * 2 * self.full_layers * self.kv_heads * self.head_dim

    @property
    def factor_bytes(self) -> int:
        """One token's part of both maps as low-rank factors: keys, W and U; inputs and gates."""
        width = self.rows + self.columns if self.kind == "delta" else self.rows
        key = self.rows if self.kind == "delta" else self.columns
        return _STORED * self.linear_layers * (self.heads * (width + 1) + self.vectors * key)

    @property
    def map_work(self) -> int:
        """Operations per token for A and B, beside the recurrence of the outputs."""
        columns = self.columns + (self.rows if self.kind == "delta" else 0)
        products = 4 if self.kind == "delta" else 2
        return products * self.linear_layers * self.heads * self.rows * columns

    @property
    def compose_work(self) -> int:
        """Operations that bring a state past one document: A·S + B."""
        product = 2 * self.rows if self.kind == "delta" else 1
        return self.linear_layers * self.heads * self.rows * self.columns * (product + 1)

    @property
    def token_work(self) -> float:
        """Operations of the weights' products for one token."""
        return 2 * self.active

    @property
    def equal_tokens(self) -> float:
        """Length at which a document's keys and values weigh as much as its maps."""
        return self.map_bytes / self.token_bytes

    @property
    def factored_tokens(self) -> float:
        """Length up to which low-rank factors weigh less than dense maps."""
        return self.map_bytes / self.factor_bytes

    @property
    def loaded_tokens(self) -> float:
        """Length whose prefill takes as long as loading the maps from the host's memory."""
        seconds = self.map_bytes / _HOST_BYTES_PER_S
        return seconds / (self.token_work / _WORK_PER_S - self.token_bytes / _HOST_BYTES_PER_S)

    def figures(self) -> dict[str, tuple[float, str]]:
        """Each figure with its unit, by name."""
        million = 1e6
        return {
            "state of a request": (self.state_bytes / million, "MB"),
            "maps of a document": (self.map_bytes / million, "MB"),
            "borders of a document": (self.border_bytes / million, "MB"),
            "keys and values of a token": (self.token_bytes / 1e3, "kB"),
            "keys and values equal the maps at": (self.equal_tokens, "tokens"),
            "factors are smaller up to": (self.factored_tokens, "tokens"),
            "a load from host memory equals prefill of": (self.loaded_tokens, "tokens"),
            "maps, operations per token": (100 * self.map_work / self.token_work, "%"),
            "composition, operations per document": (self.compose_work / 1e9, "GFLOP"),
            "composition equals prefill of": (self.compose_work / self.token_work, "tokens"),
        }


SHAPES = (
    HybridShape("Qwen3-Next-80B-A3B", "delta", 36, 12, 32, 16, 128, 128, 2, 256, 3e9),
    HybridShape("Qwen3.5-35B-A3B", "delta", 30, 10, 32, 16, 128, 128, 2, 256, 3e9),
    HybridShape("Qwen3.5-9B", "delta", 24, 8, 32, 16, 128, 128, 4, 256, 9e9),
    HybridShape("Qwen3.5-27B", "delta", 48, 16, 48, 16, 128, 128, 4, 256, 27e9),
    HybridShape("Granite-4.0-H-Micro", "mamba", 36, 4, 64, 1, 64, 128, 8, 64, 3e9),
    HybridShape("Granite-4.0-H-Tiny", "mamba", 36, 4, 48, 1, 64, 128, 4, 128, 1e9),
    HybridShape("Granite-4.0-H-Small", "mamba", 36, 4, 128, 1, 64, 128, 8, 128, 9e9),
)
