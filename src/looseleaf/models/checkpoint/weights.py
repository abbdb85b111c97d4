"""Weights of a decoder from safetensors or GGUF files, fused for its products.

q, k and v become one matrix, as do gate and up. Parts are read into it in its final dtype and on
its final device, so loading never holds two copies.
"""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Lock, local
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looseleaf.config import ModelConfig
from looseleaf.errors import CorruptCheckpoint
from looseleaf.models.checkpoint.branch_tensors import (
    read_branch,
    read_inputs,
    read_layer_inputs,
)
from looseleaf.models.checkpoint.checker import Checker, rows_of
from looseleaf.models.checkpoint.checkpoint import list_tensors
from looseleaf.models.checkpoint.cuts import (
    Cuts,
    LayerCuts,
    cut_blocks,
    cut_codes,
    part_shape,
    taken,
)
from looseleaf.models.checkpoint.expert_tensors import (
    padded_router,
    read_experts,
    read_router,
)
from looseleaf.models.checkpoint.gguf.blocks import block_matrix, copy_values, keeps_values
from looseleaf.models.checkpoint.gguf.tensor_table import BlockEntry
from looseleaf.models.checkpoint.interleaved_experts import gguf_blocks
from looseleaf.models.checkpoint.latent_tensors import fused_tensors, read_latent
from looseleaf.models.checkpoint.scaled_tensors import (
    StoredMatrix,
    decode,
)
from looseleaf.models.checkpoint.tensor_names import EMBEDDING, HEAD, by_canonical_name
from looseleaf.models.layers import DecoderWeights, LayerWeights, Norm
from looseleaf.models.linear import Projection, pack
from looseleaf.models.quantized import QuantizedWeight
from looseleaf.ops.dense.plane_linear import fits as fits_planes
from looseleaf.ops.dense.quantized_linear import BlockMatrix
from looseleaf.ops.dense.quantized_linear.formats import CHUNK
from looseleaf.ops.dense.rms_norm.native import has_native_norm
from looseleaf.ops.dense.scaled_linear import (
    TILE,
    TILE_FEATURES,
    Codes,
    ScaledMatrix,
    dequantize,
    fits,
    stack,
)
from looseleaf.ops.dense.scaled_linear import (
    quantize as quantize_matrix,
)
from looseleaf.ops.experts.mlp.mxfp4 import Mxfp4Matrix
from looseleaf.parallel import Cut, Ranks

_log = logging.getLogger(__name__)

# more threads wait for memory and for each other
_MAX_THREADS = 8
# rows per comparison
_COMPARED_ROWS = 4096
_FUSED_GATES = ("phi3", "glm", "glm4")


class _NormNames(NamedTuple):
    """A family's names of the norms before and after attention and MLP."""

    input: str = "input_layernorm"
    mlp: str = "post_attention_layernorm"
    output: str = "post_attention_layernorm"
    down: str = "post_feedforward_layernorm"


_NORM_NAMES = {
    "gemma2": _NormNames(mlp="pre_feedforward_layernorm"),
    "gemma3_text": _NormNames(mlp="pre_feedforward_layernorm"),
    "gemma4_text": _NormNames(mlp="pre_feedforward_layernorm"),
    "gemma4_unified_text": _NormNames(mlp="pre_feedforward_layernorm"),
    "glm4": _NormNames(output="post_self_attn_layernorm", down="post_mlp_layernorm"),
}


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    packed: bool = True,
    native: bool = True,
    quantize: Codes | None = None,
    ranks: Ranks | None = None,
) -> DecoderWeights:
    """All weights of the checkpoint in ``folder``, in ``dtype`` on ``device``.

    ``packed`` allows matrices in this machine's fastest layout; packing copies each matrix.
    ``native`` allows C kernels, which need a C compiler.
    ``quantize`` narrows 16-bit matrices of layers, one after another.
    With ``ranks`` they are this rank's slices of the whole model ``config``.
    Raises CorruptCheckpoint if a tensor is missing, unknown, truncated or has a wrong shape, before
    the first read.
    """
    entries = by_canonical_name(folder, list_tensors(folder))
    shard = None if ranks is None else ranks.shard
    checker = Checker(folder, entries, config.quantization, shard)
    _assemble(checker, config, threads=1)
    checker.check_all_used(config)
    target = torch.device(device)
    native = native and has_native_norm(dtype, target)
    with _Reader(checker, dtype, target, packed, native, quantize) as reader:
        weights = _assemble(reader, config, threads=min(_MAX_THREADS, os.cpu_count() or 1))
    return replace(weights, ranks=ranks)


def _assemble(reader: "Checker", config: ModelConfig, threads: int) -> DecoderWeights:
    final = "model.final_layernorm" if config.family == "phi" else "model.norm"
    embedding, lm_head = _ends(reader, config)
    with ThreadPoolExecutor(threads, "looseleaf-weights") as pool:
        layers_of = range(config.num_layers)
        layers = tuple(pool.map(lambda index: _layer(reader, config, index), layers_of))
    norm, inputs = reader.norm(final, config.hidden_size, config), read_inputs(reader, config)
    return DecoderWeights(embedding, layers, norm, lm_head, inputs=inputs)


def _ends(reader: "Checker", config: ModelConfig) -> tuple[Tensor | QuantizedWeight, Projection]:
    """Embedding and head: one matrix if tied, unless the stored matrices differ."""
    vocab, hidden = config.vocab_size, config.hidden_size
    tied = config.tie_word_embeddings
    # Transformers ties the missing matrix to the stored matrix
    source = HEAD if tied and HEAD in reader and EMBEDDING not in reader else EMBEDDING
    cuts = None if reader.shard is None else [Cut((reader.shard.vocabulary(vocab),))]
    embedding = reader.matrix([source], [vocab], hidden, cuts)
    if tied and (
        source == HEAD or HEAD not in reader or reader.agree(EMBEDDING, HEAD, (vocab, hidden))
    ):
        head = embedding
    else:
        head = reader.matrix([HEAD], [vocab], hidden, cuts)
    bias = None
    if config.lm_head_bias:
        bias = reader.fused(["lm_head.bias"], [(vocab,)], cuts=cuts)
    return embedding, reader.settle(Projection(head, bias))


def _layer(reader: "Checker", config: ModelConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    hidden, inner, fused = config.hidden_size, config.inner_size(index), config.family == "phi3"
    norms = _NORM_NAMES.get(config.family, _NormNames())
    latent = None if config.latent is None else read_latent(reader, config, attention)
    heads, stores = config.heads_of(index), index < config.num_stored_layers
    q_size, kv_size = config.num_qo_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    qkv_names = ["qkv_proj"] if fused else ["q_proj", "k_proj", "v_proj"]
    qkv_sizes = [q_size + 2 * kv_size] if fused else [q_size, kv_size, kv_size]
    if not stores or heads.tied_values:
        count = 2 if stores else 1
        qkv_names, qkv_sizes = qkv_names[:count], qkv_sizes[:count]
    if config.latent is not None:
        qkv_names, qkv_sizes = fused_tensors(config)
    up_names, up_sizes = ["gate_proj", "up_proj"], [inner, inner]
    if config.family in _FUSED_GATES:
        up_names, up_sizes = ["gate_up_proj"], [2 * inner]
    elif not config.gated_mlp:
        up_names, up_sizes = ["fc1"], [inner]
    output_name = "dense" if config.family == "phi" else "o_proj"
    down_name = "down_proj" if config.gated_mlp else "fc2"
    cuts = LayerCuts.of(config, reader.shard, fused, len(up_names))

    if config.has_experts(index):
        (gate_up, down), router = (
            read_experts(reader, config, prefix),
            read_router(reader, config, prefix),
        )
    else:
        router, bias = None, config.mlp_bias
        ups = [mlp + n for n in up_names]
        gate_up = reader.projection(ups, up_sizes, hidden, bias, cuts.gate_up)
        down = reader.projection([mlp + down_name], [hidden], inner, bias, cuts.down)

    def norm(name: str, exists: bool) -> Norm | None:
        return reader.norm(prefix + name, hidden, config) if exists else None

    def head_norm(name: str, size: int) -> Norm | None:
        size = size if config.joint_qk_norm else heads.head_dim
        return reader.norm(attention + name, size, config) if config.qk_norm else None

    sinks = None
    if config.sinks:
        per_head: list[tuple[int, ...]] = [(config.num_qo_heads,)]
        sinks = reader.fused([attention + "sinks"], per_head, wide=True, cuts=cuts.sinks)
    return LayerWeights(
        input_norm=norm(norms.input, config.pre_norms),
        qkv=reader.projection(
            [attention + n for n in qkv_names], qkv_sizes, hidden, config.qkv_bias, cuts.qkv
        ),
        output=reader.projection(
            [attention + output_name],
            [hidden],
            config.output_dim(index),
            config.output_bias,
            cuts.output,
        ),
        mlp_norm=norm(norms.mlp, config.pre_norms and not config.parallel_residual),
        gate_up=gate_up,
        down=down,
        router=router,
        q_norm=head_norm("q_norm", q_size),
        k_norm=head_norm("k_norm", kv_size) if stores else None,
        output_norm=norm(norms.output, config.post_norms),
        down_norm=norm(norms.down, config.post_norms),
        sinks=sinks,
        latent=latent,
        branch=read_branch(reader, config, prefix),
        inputs=read_layer_inputs(reader, config, prefix),
        scalar=reader.scalar(prefix + "layer_scalar") if config.layer_scalars else 1.0,
    )


class _Reader(Checker):
    """Reads tensors by name into fused tensors. Each thread opens its own files."""

    def __init__(
        self,
        checker: Checker,
        dtype: torch.dtype,
        device: torch.device,
        packed: bool,
        native: bool,
        quantize: Codes | None,
    ) -> None:
        super().__init__(checker._folder, checker._entries, checker._quantization, checker.shard)
        self._quantize = quantize
        self._dtype, self._device, self._packed = dtype, device, packed
        self._native_norms = native
        # without a kernel a product would dequantize its blocks at every call
        self._keeps_blocks = packed and native
        on_gpu = device.type == "cuda" and dtype.itemsize == 2
        self._keeps_planes = packed and on_gpu and quantize is None
        self._stack, self._local, self._lock = ExitStack(), local(), Lock()

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def narrow(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        if self._quantize is None or not isinstance(weight, Tensor):
            return weight
        if weight.shape[1] % TILE or weight.shape[0] % TILE_FEATURES:
            return weight
        narrowed = quantize_matrix(weight, self._quantize)
        return QuantizedWeight([narrowed.laid_out()], self._dtype)

    def settle(self, projection: Projection) -> Projection:
        """``projection`` in its final layout; packing copies."""
        is_plain = isinstance(projection.weight, Tensor)
        return pack(projection) if self._packed and is_plain else projection

    def scalar(self, name: str) -> float:
        return float(self.fused([name], [(1,)]))

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._read(name)

    def mxfp4(self, codes: Tensor, scales: Tensor) -> Tensor | QuantizedWeight:
        if self._device.type == "cuda" and self._dtype.itemsize == 2:
            matrix = Mxfp4Matrix(codes.to(self._device), scales.to(self._device))
            return QuantizedWeight([matrix], self._dtype)
        if self._keeps_blocks and self._device.type == "cpu":
            return QuantizedWeight.create([gguf_blocks(codes, scales)], self._dtype)
        whole = torch.empty(len(codes), 2 * codes.shape[1], dtype=self._dtype, device=self._device)
        # in parts, since values in fp32 take twice the memory
        for start in range(0, len(codes), _COMPARED_ROWS):
            rows = slice(start, start + _COMPARED_ROWS)
            whole[rows] = Mxfp4Matrix(codes[rows], scales[rows]).dequantize()
        return whole

    def router(self, weight: Tensor) -> Tensor:
        # a CPU's logits are fp32 products
        return padded_router(weight.to(self._dtype)) if weight.is_cuda else weight

    def matrix(
        self, names: list[str], sizes: list[int], fan_in: int, cuts: Cuts = None
    ) -> Tensor | QuantizedWeight:
        each = cuts or [Cut()] * len(names)
        blocks = [self._blocks(name) for name in names]
        if None not in blocks:
            pairs = zip([b for b in blocks if b is not None], each, strict=True)
            parts = [part for block, cut in pairs for part in cut_blocks(block, cut)]
            if self._keeps_blocks:
                return QuantizedWeight.create(parts, self._dtype)
            if all(map(fits_planes, parts)):
                return QuantizedWeight.in_planes(parts, self._dtype, self._device)
        stored = [self._find(n, (size, fan_in)) for n, size in zip(names, sizes, strict=True)]
        if self._device.type == "cuda" and None not in stored:
            whole = [self._decode(s) for s in stored if s is not None]
            matrices = [cut_codes(m, cut) for m, cut in zip(whole, each, strict=True)]
            first = matrices[0]
            if all(fits(m) and m.same_form(first) for m in matrices):
                return QuantizedWeight([stack(matrices).laid_out()], self._dtype)
        return super().matrix(names, sizes, fan_in, cuts)

    def expert_matrix(
        self, names: list[str], features: int, fan_in: int
    ) -> Tensor | QuantizedWeight:
        sizes = [features] * len(names)
        if self._keeps_planes and isinstance(self._entries.get(names[0]), BlockEntry):
            return self.fused(names, [(features, fan_in)] * len(names))
        return self.matrix(names, sizes, fan_in)

    def _blocks(self, name: str) -> BlockMatrix | None:
        """The matrix in the bits of its file, None where it is converted."""
        entry = self._entries.get(name)
        if not self._keeps_blocks and not self._keeps_planes:
            return None
        if isinstance(entry, BlockEntry):
            return block_matrix(entry, self._dtype)
        keeps = entry is not None and entry.dtype == "BF16" and not entry.shape[-1] % CHUNK
        keeps = keeps and self._keeps_blocks
        if not keeps or not keeps_values("BF16", self._dtype):
            return None
        return BlockMatrix("BF16", self._read(name).contiguous().view(torch.uint8))

    def _decode(self, stored: StoredMatrix) -> ScaledMatrix:
        assert self._quantization is not None, "only a quantized checkpoint has codes"
        return decode(stored, self._quantization, self._read).to(self._device)

    def fused(
        self,
        names: list[str],
        shapes: list[tuple[int, ...]],
        wide: bool = False,
        cuts: Cuts = None,
    ) -> Tensor:
        """The tensors ``names`` of ``shapes``, or parts of them, concatenated along dim 0; in fp32
        if ``wide``."""
        each = cuts or [Cut()] * len(names)
        own = [part_shape(shape, cut) for shape, cut in zip(shapes, each, strict=True)]
        dtype = torch.float32 if wide else self._dtype
        whole = torch.empty((rows_of(own), *own[0][1:]), dtype=dtype, device=self._device)
        parts = whole.split([shape[0] for shape in own])
        for part, name, shape, cut in zip(parts, names, shapes, each, strict=True):
            self._copy(name, shape, cut, part)
        return whole

    def _copy(self, name: str, shape: tuple[int, ...], cut: Cut, part: Tensor) -> None:
        """Copy the part ``cut`` of the tensor ``name`` to ``part``."""
        stored, entry = self._find(name, shape), self._entries.get(name)
        if stored is not None:
            part.copy_(taken(dequantize(self._decode(stored), torch.float32), cut))
        elif cut == Cut() and isinstance(entry, BlockEntry):
            copy_values(entry, part)
        elif cut == Cut():
            part.copy_(self._read(name))
        else:
            # rows first: files have them in one piece
            rows = cut.rows or (slice(0, shape[0]),)
            for target, chosen in zip(
                part.split([r.stop - r.start for r in rows]), rows, strict=True
            ):
                target.copy_(taken(self._read(name, chosen), Cut((), cut.columns)))

    def agree(self, first: str, second: str, shape: tuple[int, int]) -> bool:
        for start in range(0, shape[0], _COMPARED_ROWS):
            rows = slice(start, start + _COMPARED_ROWS)
            values = [self._read(name, rows).to(self._dtype) for name in (first, second)]
            if not torch.equal(*values):
                _log.warning(
                    "%s: tie_word_embeddings is true, and the values of %s and %s differ: the "
                    "model runs with both, as in Transformers; set tie_word_embeddings to false "
                    "in config.json", self._folder, first, second,
                )  # fmt: skip
                return False
        return True

    def _read(self, name: str, rows: slice | None = None) -> Tensor:
        from safetensors import SafetensorError, safe_open

        entry = self._entries[name]
        if isinstance(entry, BlockEntry):
            rows = rows or slice(0, entry.shape[0])
            values = torch.empty(len(range(entry.shape[0])[rows]), *entry.shape[1:])
            copy_values(entry, values, rows.start)
            return values
        try:
            files: dict[Path, Any] = self._local.__dict__.setdefault("files", {})
            if entry.path not in files:
                file = safe_open(str(entry.path), framework="pt")
                with self._lock:
                    files[entry.path] = self._stack.enter_context(file)
            file = files[entry.path]
            # get_tensor avoids a copy
            whole = rows is None
            tensor: Tensor = (
                file.get_tensor(entry.name) if whole else file.get_slice(entry.name)[rows]
            )
        except (SafetensorError, OSError) as error:
            raise CorruptCheckpoint(
                f"{entry.path} can't be read ({error}); download it again"
            ) from error
        return tensor
