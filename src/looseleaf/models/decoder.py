"""The decoder: one definition for every family; only the configuration differs.

It applies no RoPE and stores no keys. The attention object receives unrotated queries and keys and
knows the position of each row. So one forward pass serves prefill, decode and blending.
"""

from collections.abc import Container
from copy import copy
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.config import ModelConfig
from looseleaf.models.experts import apply_experts
from looseleaf.models.latent import attend_latents, latent_heads
from looseleaf.models.layer_chain import MAX_ROWS, LayerChain
from looseleaf.models.layer_inputs import add_inputs, layer_inputs
from looseleaf.models.layers import (
    DecoderWeights,
    ExpertBranch,
    LayerWeights,
    Stream,
    add_branch,
    add_projected,
    add_summands,
    apply_gated,
    apply_norm,
    norm_heads,
    norm_plain,
    project_heads,
)
from looseleaf.models.linear import look_up, project
from looseleaf.models.packing import Packing
from looseleaf.parallel import Ranks
from looseleaf.rope import query_scale
from looseleaf.types import Attend, LayerHook, NativeAttend


class Decoder:
    """A decoder-only transformer over rows of tokens from any requests.

    With ``ranks``, heads, columns of the MLP and vocabulary are those of this rank, as in
    ``config``, which has the whole vocabulary. All ranks call the same methods in the same order.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        packings = {
            heads: Packing.create(config, config.layer_heads.index(heads), self.device)
            for heads in config.layer_heads
        }
        self._packings = [packings.get(config.heads_of(n)) for n in range(config.num_layers)]
        self._head_counts = (config.num_qo_heads, config.num_kv_heads, config.num_kv_heads)
        dims = config.head_dim if config.latent is None else config.latent.query_dim
        scales = {rope: query_scale(replace(rope, head_dim=dims)) for rope in config.ropes}
        on_device = {
            rope: None if scale is None else scale.to(self.device, self.dtype)
            for rope, scale in scales.items()
        }
        self._query_scales = [on_device[config.rope_of(n)] for n in range(config.num_layers)]
        self.ranks = weights.ranks
        # a chain has no place for sums over ranks
        self._chain = LayerChain.create(config, weights) if self.ranks is None else None
        # C code may call attention where heads are neither normed nor scaled
        unscaled = not config.layer_heads and all(scale is None for scale in self._query_scales)
        self._has_plain_heads = unscaled and all(each.q_norm is None for each in weights.layers)
        # branches are added to the stream without a norm or a multiplier
        self._plain = not config.post_norms and config.residual_multiplier == 1.0
        # Gemma rounds the root of the hidden size to the dtype; Granite's multipliers are exact
        self._embedding_multiplier = float(
            torch.tensor(config.embedding_multiplier, dtype=self.dtype)
        )

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def state_size(self) -> int:
        """The values of a row between two layers, as hooks see them: hidden state and inputs of
        layers."""
        inputs = self.config.layer_inputs
        return self.config.hidden_size + (inputs.dim * self.config.num_layers if inputs else 0)

    def first_layers(self, count: int) -> "Decoder":
        """The model without its layers from ``count`` on, over the same weights."""
        short = copy(self)
        short.weights = replace(self.weights, layers=self.weights.layers[:count])
        return short

    @property
    def num_layers(self) -> int:
        """The number of layers of a pass."""
        return len(self.weights.layers)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Int[Tensor, " rows"],
        attend: Attend,
        hook: LayerHook | None = None,
        last_rows: Int[Tensor, " last_rows"] | None = None,
        hooked: Container[int] | None = None,
    ) -> Float[Tensor, "remaining hidden_size"]:
        """The normed hidden states after the last layer, of the rows that ``hook`` returned.

        If ``hook`` returns no rows, the pass ends. ``hooked`` are the layers that call the hook, so
        other layers can fuse their additions to the stream. ``last_rows`` are the result's rows, in
        rising order. For other rows the last layer computes only keys and values.

        The hook gets states of `state_size` values: the inputs of layers stay with their rows.
        """
        config = self.config
        stream = Stream(self._embed(tokens))
        inputs, tables = None, self.weights.inputs
        if tables is not None:
            inputs = layer_inputs(tokens, stream.total, tables, config)
        last = len(self.weights.layers) - 1
        if hook is None and self._chain is not None and len(tokens) <= MAX_ROWS:
            stream = Stream(self._chained(self._chain, stream.total, attend, last_rows))
            return apply_norm(stream, self.weights.final_norm, self.config)[0]
        for index, layer in enumerate(self.weights.layers):
            if hook is not None and (hooked is None or index in hooked):
                stream, inputs = self._hooked(hook, index, stream, inputs)
                if not len(stream.total):
                    return stream.total
            rows = last_rows if index == last else None
            stream = self._layer(index, layer, stream, attend, rows)
            if inputs is not None:
                own = inputs if rows is None else inputs[rows]
                stream = add_inputs(stream, own, layer.inputs, index, config)
            if layer.scalar != 1.0:
                stream = Stream(stream.settled() * layer.scalar)
        normed, _ = apply_norm(stream, self.weights.final_norm, self.config)
        return normed

    @torch.inference_mode()
    def logits(self, hidden: Float[Tensor, "rows hidden_size"]) -> Float[Tensor, "rows vocab_size"]:
        """Scores over the vocabulary, in the model's dtype."""
        config, scores = self.config, project(hidden, self.weights.lm_head)
        if self.ranks is not None:
            scores = self.ranks.vocabulary(scores, config.vocab_size)
        if config.logits_scaling != 1.0:
            scores = scores / config.logits_scaling
        if config.final_soft_cap:
            scores = torch.tanh(scores / config.final_soft_cap) * config.final_soft_cap
        return scores

    @torch.inference_mode()
    def keys_values(
        self, layer: int, hidden: Float[Tensor, "rows hidden_size"]
    ) -> tuple[Float[Tensor, "rows kv_heads head_dim"], Float[Tensor, "rows kv_heads head_dim"]]:
        """Unrotated keys and values of ``layer``, which stores them, for its input states."""
        norm = self.weights.layers[layer].input_norm
        states = hidden[:, : self.config.hidden_size].contiguous()
        normed, _ = apply_norm(Stream(states), norm, self.config)
        _, k, v = self._split_heads(layer, project_heads(normed, self.weights.layers[layer].qkv))
        assert k is not None and v is not None, "a layer that shares KV has none of its own"
        return k, v

    def _hooked(
        self, hook: LayerHook, index: int, stream: Stream, inputs: Tensor | None
    ) -> tuple[Stream, Tensor | None]:
        """The stream and the inputs of the rows that ``hook`` returns."""
        if inputs is None:
            return Stream(hook(index, stream.settled())), None
        states = hook(index, torch.cat([stream.settled(), inputs], 1))
        hidden, inputs = states.tensor_split([self.config.hidden_size], 1)
        return Stream(hidden.contiguous()), inputs

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.ranks is None:
            embedded = look_up(self.weights.embedding, tokens)
        else:
            embedded = self._embed_split(tokens, self.ranks)
        if self._embedding_multiplier == 1.0:
            return embedded
        return embedded * self._embedding_multiplier

    def _embed_split(self, tokens: Tensor, ranks: Ranks) -> Tensor:
        """Embeddings, each of them from the rank that has its token."""
        own = ranks.shard.vocabulary(self.config.vocab_size)
        is_own = (tokens >= own.start) & (tokens < own.stop)
        rows = (tokens - own.start).clamp(0, max(0, own.stop - own.start - 1))
        embedded = look_up(self.weights.embedding, rows)
        return ranks.sum(embedded.masked_fill(~is_own[:, None], 0.0))

    def _layer(
        self,
        index: int,
        layer: LayerWeights,
        stream: Stream,
        attend: Attend,
        last_rows: Tensor | None,
    ) -> Stream:
        config, ranks = self.config, self.ranks
        normed, stream = apply_norm(stream, layer.input_norm, config)
        product = project_heads if normed.is_cuda else project
        q, k, v = self._split_heads(index, product(normed, layer.qkv))
        if last_rows is not None:
            q, normed, stream = q[last_rows], normed[last_rows], Stream(stream.total[last_rows])
        packing = self._packings[index]
        if layer.latent is not None and config.latent is not None and k is not None:
            attended = attend_latents(attend, index, q, k, layer.latent, config.latent)
        else:
            attended = attend(index, q, k, v)
            attended = attended.flatten(1) if packing is None else packing.unpack(attended)
        if not len(attended):
            return stream
        if self._plain:
            stream = add_projected(stream, attended, layer.output, ranks)
        else:
            stream = add_branch(stream, attended, layer.output, layer.output_norm, config, ranks)
        if layer.branch is not None:
            return self._beside_experts(stream, layer, layer.branch)
        if not config.parallel_residual:
            normed, stream = apply_norm(stream, layer.mlp_norm, config)
        if layer.router is not None:
            branch = apply_experts(normed, layer, config)
            return add_summands(stream, branch, layer.down_norm, config)
        inner = apply_gated(normed, layer.gate_up, config)
        if self._plain:
            return add_projected(stream, inner, layer.down, ranks)
        return add_branch(stream, inner, layer.down, layer.down_norm, config, ranks)

    def _beside_experts(self, stream: Stream, layer: LayerWeights, branch: ExpertBranch) -> Stream:
        """The stream plus the normed sum of the MLP and of experts beside it."""
        config = self.config
        normed, stream = apply_norm(stream, layer.mlp_norm, config)
        dense = project(apply_gated(normed, layer.gate_up, config), layer.down)
        routed = norm_plain(stream.total, config.norm_eps)
        normed, _ = apply_norm(Stream(stream.total), branch.input_norm, config)
        mixed = apply_experts(normed, branch, config, routed)
        mixed = (mixed if mixed.ndim == 2 else mixed.sum(0)).to(dense.dtype)
        total = apply_norm(Stream(dense), branch.dense_norm, config)[0]
        total = total + apply_norm(Stream(mixed), branch.output_norm, config)[0]
        return add_summands(stream, total, layer.down_norm, config)

    def _chained(
        self, chain: LayerChain, stream: Tensor, attend: Attend, last_rows: Tensor | None
    ) -> Tensor:
        """The stream after the last layer, by one call for all layers or one call a layer."""
        all_rows = last_rows is None or len(last_rows) == len(stream)
        if self._has_plain_heads and all_rows and isinstance(attend, NativeAttend):
            after = chain.run(stream, attend, partial(self._split_heads, 0))
            if after is not None:
                return after
        last, heads = len(self.weights.layers) - 1, None
        for index in range(last + 1):
            q, k, v = self._split_heads(
                index, chain.heads(index, stream) if heads is None else heads
            )
            if index == last and last_rows is not None:
                q, stream = q[last_rows], stream[last_rows]
            attended = attend(index, q, k, v).flatten(1)
            if not len(attended):
                return stream
            stream, heads = chain.branches(index, stream, attended, index < last)
        return stream

    def _split_heads(
        self, index: int, heads: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries, keys and values of fused ``heads``, normed and scaled, as they are stored; None
        for those of a layer that stores none. With latents, queries are not mapped yet, and the
        keys are the values."""
        rows, config, layer = heads.shape[0], self.config, self.weights.layers[index]
        scale = self._query_scales[index]
        if config.layer_heads:
            return self._packed_heads(index, heads)
        if layer.latent is not None and config.latent is not None:
            q, k = latent_heads(heads, layer.latent, config.latent, scale)
            return q, k, k
        fused = heads.view(rows, sum(self._head_counts), config.head_dim)
        q, k, v = fused.split_with_sizes(self._head_counts, 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            if config.joint_qk_norm:
                q, k = q.flatten(1), k.flatten(1)
            q = norm_heads(q, layer.q_norm, config.norm_eps)
            k = norm_heads(k, layer.k_norm, config.norm_eps)
            if config.joint_qk_norm:
                q, k = (x.view(rows, -1, config.head_dim) for x in (q, k))
        if scale is not None:
            q = q * scale
        return q, k, v

    def _packed_heads(
        self, index: int, heads: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `_split_heads`, of a layer with heads of its own size."""
        config, layer = self.config, self.weights.layers[index]
        own, packing, eps = config.layer_heads[index], self._packings[index], config.norm_eps
        fused = heads.view(len(heads), -1, own.head_dim)
        q, rest = fused.tensor_split([config.num_qo_heads], 1)
        if layer.q_norm is not None:
            q = norm_heads(q, layer.q_norm, eps)
        if packing is not None:
            q = packing.pack_queries(q)
        scale = self._query_scales[index]
        if scale is not None:
            q = q * scale
        if index >= config.num_stored_layers:
            return q, None, None
        k, v = (rest, rest) if own.tied_values else rest.chunk(2, 1)
        if layer.k_norm is not None:
            k = norm_heads(k, layer.k_norm, eps)
        if config.value_norm:
            v = norm_plain(v, eps)
        return (q, k, v) if packing is None else (q, packing.pack_keys(k), packing.pack_keys(v))
