"""Checks of the tensors that a decoder needs, by the headers of their files."""

import re
from pathlib import Path

import torch
from torch import Tensor

from looseleaf.config import ModelConfig, Quantization
from looseleaf.errors import CorruptCheckpoint, UnsupportedModel
from looseleaf.models.checkpoint.checkpoint import misfit, shortened
from looseleaf.models.checkpoint.cuts import (
    Cuts,
)
from looseleaf.models.checkpoint.gguf.tensor_table import BlockEntry
from looseleaf.models.checkpoint.header import FLOATS, TensorEntry
from looseleaf.models.checkpoint.scaled_tensors import (
    UNUSED,
    StoredMatrix,
    find_stored,
)
from looseleaf.models.layers import Norm
from looseleaf.models.linear import Projection
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.parallel import Shard

# buffers in old checkpoints that the decoder does not need
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq$|.*\.masked_bias$")
_LAYER = re.compile(r"model\.layers\.(\d{1,5})\.")
# Transformers, too, ignores KV weights of layers that store no KV
_OWN_KV = re.compile(r"model\.layers\.(\d{1,5})\.self_attn\.[kv]_(proj|norm)\.")
_TOWERS = re.compile(
    r"model\.(vision_tower|embed_vision|audio_tower|embed_audio|vision_embedder)\."
)
# families whose layers after the last predict further tokens, which the decoder does not use
_PREDICTING = ("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite")


class Checker:
    """Checks the tensors that a decoder needs against the headers; reads no data.

    Its tensors have shapes and no memory.
    """

    _native_norms = False

    def __init__(
        self,
        folder: Path,
        entries: dict[str, TensorEntry],
        quantization: Quantization | None,
        shard: Shard | None = None,
    ) -> None:
        self._folder, self._entries, self._quantization = folder, entries, quantization
        self.shard = shard
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def projection(
        self, names: list[str], sizes: list[int], fan_in: int, bias: bool, cuts: Cuts = None
    ) -> Projection:
        matrices = [name + ".weight" for name in names]
        weight = self.narrow(self.matrix(matrices, sizes, fan_in, cuts))
        biases, shapes = [name + ".bias" for name in names], [(size,) for size in sizes]
        # quantized products add their bias in fp32
        wide = isinstance(weight, QuantizedWeight)
        added = self.fused(biases, [*shapes], wide=wide, cuts=cuts) if bias else None
        if cuts and cuts[0].columns is not None and self.shard is not None and self.shard.rank:
            # the bias of a sum over ranks is added once
            added = None
        return self.settle(Projection(weight, added))

    def matrix(
        self, names: list[str], sizes: list[int], fan_in: int, cuts: Cuts = None
    ) -> Tensor | QuantizedWeight:
        """The matrices ``names``, or parts of them, one below the other, in their blocks if all are
        quantized."""
        return self.fused(names, [(size, fan_in) for size in sizes], cuts=cuts)

    def expert_matrix(
        self, names: list[str], features: int, fan_in: int
    ) -> Tensor | QuantizedWeight:
        """Matrices of one shape, one below the other, in a form that products by expert read."""
        return self.matrix(names, [features] * len(names), fan_in)

    def narrow(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        """The weight of a layer, quantized if that was asked for."""
        return weight

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The uint8 tensor ``name``, on the CPU."""
        entry = self._entries.get(name)
        if entry is None:
            raise CorruptCheckpoint(f"{self._folder} lacks {name}; {misfit(self._folder)}")
        if entry.dtype != "U8" or entry.shape != shape:
            raise CorruptCheckpoint(
                f"{self._folder}: {entry.name} is {entry.dtype[:20]} {list(entry.shape)}, "
                f"config.json asks for U8 {list(shape)}; config.json and the weights do not fit "
                "together"
            )
        self._used.add(name)
        return torch.empty(shape, dtype=torch.uint8, device="meta")

    def mxfp4(self, codes: Tensor, scales: Tensor) -> Tensor | QuantizedWeight:
        """Experts in MXFP4: in their bits where products read them, else their values.

        ``codes`` are ``[features, columns / 2]``, ``scales`` ``[features, columns / 32]``."""
        return torch.empty(len(codes), 2 * codes.shape[1], device="meta")

    def settle(self, projection: Projection) -> Projection:
        """``projection`` in its final layout."""
        return projection

    def router(self, weight: Tensor) -> Tensor:
        """A router's matrix in its final dtype and layout."""
        return weight

    def scalar(self, name: str) -> float:
        """The value of a tensor of one number, in the model's dtype."""
        self.fused([name], [(1,)])
        return 1.0

    def norm(self, name: str, size: int, config: ModelConfig) -> Norm:
        if config.norm_offset:
            # Transformers adds the offset in fp32 and rounds the norm's result only: bf16 would
            # round a weight near 1
            wide = self.fused([name + ".weight"], [(size,)], wide=True)
            return Norm(wide + config.norm_offset, native=self._native_norms)
        weight = self.fused([name + ".weight"], [(size,)])
        if config.norm == "rms":
            return Norm(weight, native=self._native_norms)
        return Norm(weight, self.fused([name + ".bias"], [(size,)]))

    def fused(
        self,
        names: list[str],
        shapes: list[tuple[int, ...]],
        wide: bool = False,
        cuts: Cuts = None,
    ) -> Tensor:
        """The tensors ``names`` of ``shapes``, or parts of them, concatenated along dim 0; in fp32
        if ``wide``."""
        stored = {name: self._find(name, shape) for name, shape in zip(names, shapes, strict=True)}
        missing = [n for n in names if n not in self._entries and stored[n] is None]
        if missing:
            raise CorruptCheckpoint(
                f"{self._folder} lacks {shortened(missing)}; {misfit(self._folder)}"
            )
        for name, shape in zip(names, shapes, strict=True):
            codes = stored[name]
            if codes is None:
                self._check(self._entries[name], shape)
            self._used.update([name] if codes is None else codes.names)
        return torch.empty((rows_of(shapes), *shapes[0][1:]), device="meta")

    def agree(self, first: str, second: str, shape: tuple[int, int]) -> bool:
        """Whether two matrices have the same values in the model's dtype."""
        self.fused([first, second], [shape, shape])
        return True

    def _find(self, name: str, shape: tuple[int, ...]) -> StoredMatrix | None:
        """The stored form of a quantized matrix."""
        if len(shape) != 2:
            return None
        return find_stored(self._quantization, self._entries, name, (shape[0], shape[1]))

    def check_all_used(self, config: ModelConfig) -> None:
        ignored = {name for name in self._entries if _IGNORED.match(name)}
        if config.family in _PREDICTING:
            layers = {name: _LAYER.match(name) for name in self._entries}
            ignored |= {
                n for n, match in layers.items() if match and int(match[1]) >= config.num_layers
            }
        if config.layer_heads:
            of_towers = {n for n in self._entries if _TOWERS.match(n)}
            matches = {n: _OWN_KV.match(n) for n in self._entries}
            first = config.num_stored_layers
            shared = {n for n, match in matches.items() if match and int(match[1]) >= first}
            ignored |= of_towers | shared
        if self._quantization is not None:
            ignored |= {n for n in self._entries if n.rpartition(".")[2] in UNUSED}
        unused = set(self._entries) - self._used - ignored
        unknown = sorted(self._entries[name].name for name in unused)
        if unknown:
            raise CorruptCheckpoint(
                f"{self._folder} holds tensors that a {config.family} model of this shape has "
                f"no place for: {shortened(unknown)}; config.json and the weights do not fit "
                "together"
            )

    def _check(self, entry: TensorEntry, shape: tuple[int, ...]) -> None:
        if entry.dtype not in FLOATS and not isinstance(entry, BlockEntry):
            raise UnsupportedModel(
                f"{self._folder}: {entry.name} is stored as {entry.dtype[:200]} without scales; "
                "use a checkpoint in float32, float16 or bfloat16, or one with its scales"
            )
        if entry.shape != shape:
            raise CorruptCheckpoint(
                f"{self._folder}: {entry.name} has shape {list(entry.shape)}, config.json asks "
                f"for {list(shape)}; config.json and the weights do not fit together"
            )


def rows_of(shapes: list[tuple[int, ...]]) -> int:
    return sum(shape[0] for shape in shapes)
