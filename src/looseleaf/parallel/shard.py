"""The share of one rank: its KV heads and query heads, its columns of the MLP, its vocabulary."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from looseleaf.config import ModelConfig
from looseleaf.errors import InvalidOption, UnsupportedModel


class Cut(NamedTuple):
    """A part of a stored matrix: ``rows`` in order, all if empty; ``columns``, all if None."""

    rows: tuple[slice, ...] = ()
    columns: slice | None = None

    def shape(self, features: int, columns: int) -> tuple[int, int]:
        """The shape of the part of a matrix ``[features, columns]``."""
        rows = sum(part.stop - part.start for part in self.rows) if self.rows else features
        return rows, columns if self.columns is None else self.columns.stop - self.columns.start


@dataclass(frozen=True)
class Shard:
    """Rank ``rank`` of ``size`` ranks.

    Query heads are split evenly. KV heads too, or several ranks have the same KV head."""

    rank: int
    size: int

    def require(self, config: ModelConfig) -> None:
        """Raise InvalidOption or UnsupportedModel for a model that can't be split by ``size``."""
        heads, kv_heads, inner = config.num_qo_heads, config.num_kv_heads, config.intermediate_size
        divides = kv_heads % self.size == 0 or self.size % kv_heads == 0
        if heads % self.size or not divides or inner % self.size:
            raise InvalidOption(
                f"tensor_parallel={self.size} does not divide the model's {heads} query heads, "
                f"{kv_heads} KV heads and {inner} columns of the MLP: choose a divisor",
                "tensor_parallel",
            )
        forms = {
            "norm all heads jointly": config.joint_qk_norm,
            "have latent attention": config.latent is not None,
            "have experts": config.experts is not None,
            "have heads of several sizes": bool(config.layer_heads),
        }
        for form, is_so in forms.items():
            if is_so:
                raise UnsupportedModel(
                    f"models of the family {config.family} {form}, which tensor_parallel does not "
                    "support: leave it out"
                )

    def local(self, config: ModelConfig) -> ModelConfig:
        """The model as this rank computes it; the vocabulary stays whole."""
        return replace(
            config,
            num_qo_heads=config.num_qo_heads // self.size,
            num_kv_heads=max(1, config.num_kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
        )

    def even(self, total: int, first: int = 0) -> slice:
        """This rank's share of ``total`` rows or columns that begin at ``first``."""
        share = total // self.size
        return slice(first + self.rank * share, first + (self.rank + 1) * share)

    def vocabulary(self, total: int) -> slice:
        """This rank's tokens; the last ranks may have fewer."""
        share = self.largest_vocabulary(total)
        start = min(total, self.rank * share)
        return slice(start, min(total, start + share))

    def largest_vocabulary(self, total: int) -> int:
        """The most tokens of a rank."""
        return -(-total // self.size)

    def queries(self, config: ModelConfig) -> slice:
        """Rows of this rank's query heads in the projection of queries."""
        return self.even(config.num_qo_heads * config.head_dim)

    def keys(self, config: ModelConfig, first: int = 0) -> slice:
        """Rows of this rank's KV heads in a projection of keys or values that begins at
        ``first``."""
        local = max(1, config.num_kv_heads // self.size) * config.head_dim
        head = self.rank * config.num_kv_heads // self.size
        start = first + head * config.head_dim
        return slice(start, start + local)
