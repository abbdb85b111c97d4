"""The decoder: one definition for every family; only the configuration differs.

It applies no RoPE and stores no keys. The attention object receives unrotated queries and keys and
knows the position of each row. So one forward pass serves prefill, decode and blending.
"""

from collections.abc import Container
from copy import copy
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.config import ModelConfig
from looseleaf.models.experts import apply_experts
from looseleaf.models.latent import attend_latents, latent_heads
from looseleaf.models.layer_chain import MAX_ROWS, LayerChain
from looseleaf.models.layers import (
    DecoderWeights,
    LayerWeights,
    Stream,
    add_branch,
    add_projected,
    add_summands,
    apply_gated,
    apply_norm,
    norm_heads,
    project_heads,
)
from looseleaf.models.linear import look_up, project
from looseleaf.parallel import Ranks
from looseleaf.rope import query_scale
from looseleaf.types import Attend, LayerHook


class Decoder:
    """A decoder-only transformer over rows of tokens from any requests.

    With ``ranks``, heads, columns of the MLP and vocabulary are those of this rank, as in
    ``config``, which has the whole vocabulary. All ranks call the same methods in the same order.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
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

    def first_layers(self, count: int) -> "Decoder":
        """The model without its layers from ``count`` on, over the same weights."""
        short = copy(self)
        short.weights = replace(self.weights, layers=self.weights.layers[:count])
        return short

    @torch.inference_mode()
    def forward(
        self,
        tokens: Int[Tensor, " rows"],
        attend: Attend,
        hook: LayerHook | None = None,
        asked: Int[Tensor, " asked"] | None = None,
        hooked: Container[int] | None = None,
    ) -> Float[Tensor, "remaining hidden_size"]:
        """The normed hidden states after the last layer, of the rows that ``hook`` returned.

        If ``hook`` returns no rows, the pass ends. ``hooked`` are the layers that call the hook, so
        other layers can fuse their additions to the stream. ``asked`` are the rows of the result,
        in rising order. For other rows the last layer computes only keys and values.
        """
        stream = Stream(self._embed(tokens))
        last = len(self.weights.layers) - 1
        if hook is None and self._chain is not None and len(tokens) <= MAX_ROWS:
            stream = Stream(self._chained(self._chain, stream.total, attend, asked))
            return apply_norm(stream, self.weights.final_norm, self.config)[0]
        for index, layer in enumerate(self.weights.layers):
            if hook is not None and (hooked is None or index in hooked):
                stream = Stream(hook(index, stream.settled()))
                if not len(stream.total):
                    return stream.total
            stream = self._layer(index, layer, stream, attend, asked if index == last else None)
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
        """Unrotated keys and values of ``layer`` for its input hidden states."""
        norm = self.weights.layers[layer].input_norm
        normed, _ = apply_norm(Stream(hidden), norm, self.config)
        _, k, v = self._split_heads(layer, project_heads(normed, self.weights.layers[layer].qkv))
        return k, v

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
        if layer.latent is None or config.latent is None:
            attended = attend(index, q, k, v).flatten(1)
        else:
            attended = attend_latents(attend, index, q, k, layer.latent, config.latent)
        if not len(attended):
            return stream
        if self._plain:
            stream = add_projected(stream, attended, layer.output, ranks)
        else:
            stream = add_branch(stream, attended, layer.output, layer.output_norm, config, ranks)
        if not config.parallel_residual:
            normed, stream = apply_norm(stream, layer.mlp_norm, config)
        if layer.router is not None:
            branch = apply_experts(normed, layer, config)
            return add_summands(stream, branch, layer.down_norm, config)
        inner = apply_gated(normed, layer.gate_up, config)
        if self._plain:
            return add_projected(stream, inner, layer.down, ranks)
        return add_branch(stream, inner, layer.down, layer.down_norm, config, ranks)

    def _chained(
        self, chain: LayerChain, stream: Tensor, attend: Attend, last_rows: Tensor | None
    ) -> Tensor:
        """The stream after the last layer, with one call of products a layer."""
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

    def _split_heads(self, index: int, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of fused ``heads``, normed and scaled. With latents, queries
        are not mapped yet, and the keys are the values."""
        rows, config, layer = heads.shape[0], self.config, self.weights.layers[index]
        scale = self._query_scales[index]
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
