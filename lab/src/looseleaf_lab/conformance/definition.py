"""The reference answer: all tokens of a request in one dense pass of plain PyTorch.

The pass shares weights and RoPE frequencies with the engine and no other code: no operator of
`looseleaf.ops`, no pages, frames or merges. In a wide dtype its result is the truth. In the
engine's own dtype its error sets the budget.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from looseleaf.config import ModelConfig
from looseleaf.llm.load import LoadedModel
from looseleaf.models.experts import expert_of
from looseleaf.models.layers import ExpertBranch, LatentWeights, LayerWeights, Norm, Router
from looseleaf.models.linear import Projection, look_up, unpack
from looseleaf.ops.experts.route import route
from looseleaf.prompt.request import DocumentPart, PromptParts
from looseleaf.rope import rope_frequencies
from looseleaf.types import AttnState

# rows of one block of scores, which bounds the memory of a pass
_ROWS = 256
SHIFTS = (0, 11, 23)
"""Shifts of all positions, for samples of rounding: exact attention is invariant to them."""


@dataclass(frozen=True, eq=False)
class Visibility:
    """Rows and the keys they see, by the causal rule over ``row_positions`` and ``key_positions``.

    ``rows`` indexes the rows of a pass, ``keys`` all tokens; all four are int64.
    """

    rows: Tensor
    keys: Tensor
    row_positions: Tensor
    key_positions: Tensor


@dataclass(eq=False)
class HeadStates:
    """Unrotated ``q``, ``k`` and ``v`` of a pass, ``[rows, heads, head_dim]``, by layer."""

    layers: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)


class Definition:
    """Dense passes over a loaded model, on the device of its weights."""

    def __init__(self, loaded: LoadedModel, stored_in: torch.dtype | None = None) -> None:
        """With ``stored_in``, passes in the model's own dtype round keys and values to that dtype,
        as pages do. Wider passes do not."""
        self.shape = loaded.shape
        self._stored_and_own_dtype = stored_in, loaded.decoder.dtype
        self.weights = loaded.decoder.weights
        self.device = loaded.decoder.device
        laws = (rope_frequencies(loaded.shape.rope_of(n)) for n in range(loaded.shape.num_layers))
        self._laws = [law._replace(inverse=law.inverse.to(self.device)) for law in laws]

    def full(self, tokens: list[int]) -> list[Visibility]:
        """Causal visibility of a plain prompt."""
        positions = torch.arange(len(tokens), device=self.device)
        return [Visibility(positions, positions, positions, positions)]

    def reused(self, parts: PromptParts, num_more: int) -> list[Visibility]:
        """Visibility with stored documents, and ``num_more`` text tokens after the prompt.

        A document's tokens see their context and themselves, at positions right after the context.
        Text sees everything before it."""
        documents, text, start = [], [], 0
        for part in parts:
            positions = torch.arange(start, start + len(part.tokens), device=self.device)
            start += len(part.tokens)
            if not isinstance(part, DocumentPart):
                text.append(positions)
                continue
            context_positions = torch.arange(part.context_length, device=self.device)
            document_positions = (
                torch.arange(len(positions), device=self.device) + part.context_length
            )
            keys = torch.cat([context_positions, positions])
            documents.append(
                Visibility(
                    positions,
                    keys,
                    document_positions,
                    torch.cat([context_positions, document_positions]),
                )
            )
        rest = torch.arange(start, start + num_more, device=self.device)
        rows, all_positions = (
            torch.cat([*text, rest]),
            torch.arange(start + num_more, device=self.device),
        )
        return [*documents, Visibility(rows, all_positions, rows, all_positions)]

    @torch.inference_mode()
    def hidden(
        self,
        tokens: list[int],
        visibility: list[Visibility],
        dtype: torch.dtype,
        *,
        shift: int = 0,
        keep: HeadStates | None = None,
        stored: HeadStates | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Normed hidden states after the last layer, ``[rows, hidden]`` in ``dtype``.

        ``keep`` collects each layer's q, k and v. With ``rows``, the pass computes only these
        tokens, and reads the keys and values of all other tokens from ``stored``."""
        ids = torch.tensor(tokens, device=self.device)
        ids = ids if rows is None else ids[rows]
        x = self._embed(ids, dtype)
        inputs, of_layers = self._inputs(ids, x), HeadStates()
        for index, layer in enumerate(self.weights.layers):
            normed = x if layer.input_norm is None else self._norm(x, layer.input_norm)
            own = self.shape.kv_layer(index) == index
            q, k, v = self._heads(index, layer, normed)
            if not own:
                _, k, v = of_layers.layers[self.shape.kv_layer(index)]
            if keep is not None:
                keep.layers[index] = q, k, v
            if own and stored is not None and rows is not None:
                _, old_k, old_v = stored.layers[index]
                k, v = old_k.index_copy(0, rows, k), old_v.index_copy(0, rows, v)
            of_layers.layers[index] = q, k, v
            attended = torch.empty_like(q)
            for span in visibility:
                attended[span.rows] = self.state(
                    index, q[span.rows], k[span.keys], v[span.keys],
                    (span.row_positions, span.key_positions), shift,
                ).out  # fmt: skip
            attended = _project(self._values(index, layer, attended).flatten(1), layer.output)
            x = x + self._branch(attended, layer.output_norm)
            if not self.shape.parallel_residual:
                normed = x if layer.mlp_norm is None else self._norm(x, layer.mlp_norm)
            x = x + self._branch(self._mlp(layer, normed, x), layer.down_norm)
            if inputs is not None and layer.inputs is not None:
                gate = _activate(_project(x, layer.inputs.gate), self.shape) * inputs[:, index]
                x = x + self._norm(_project(gate, layer.inputs.projection), layer.inputs.norm)
            x = x * layer.scalar
        return self._norm(x, self.weights.final_norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary, ``[rows, vocab_size]``."""
        scores = _project(hidden, self.weights.lm_head) / self.shape.logits_scaling
        cap = self.shape.final_soft_cap
        return cap * (scores / cap).tanh() if cap else scores

    @torch.inference_mode()
    def state(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: tuple[Tensor, Tensor],
        shift: int = 0,
        *,
        final: bool = True,
    ) -> AttnState:
        """Softmax attention of ``q`` over the keys at or before its position, in ``q``'s dtype.

        Keys are rotated to their true positions; softmax is at least fp32. A
        ``final`` state has the layer's sinks. Returns the output and its log-sum-exp ``[rows,
        heads]``; rows without keys and sinks give ``(0, -inf)``."""
        row_positions, key_positions = positions
        group = self.shape.num_qo_heads // self.shape.num_kv_heads
        rotated = self._stored(self._rotate(layer, k, key_positions + shift)).repeat_interleave(
            group, 1
        )
        values = self._stored(v).repeat_interleave(group, 1)
        scale, window, cap = (
            self.shape.softmax_scale or self.shape.head_dim**-0.5,
            self.shape.window(layer),
            self.shape.soft_cap,
        )
        out, lse = [], []
        sinks = self.weights.layers[layer].sinks if final else None
        q = self._scaled(q, row_positions)
        for block_positions, block in zip(row_positions.split(_ROWS), q.split(_ROWS), strict=True):
            scores = torch.einsum(
                "qhd,khd->hqk", self._rotate(layer, block, block_positions + shift), rotated
            )
            scores = scores.to(_softmax_dtype(q.dtype)) * scale
            if cap:
                scores = cap * (scores / cap).tanh()
            distance = block_positions[:, None] - key_positions
            visible = (distance >= 0) & (distance < window) if window else distance >= 0
            scores = scores.masked_fill(~visible, -torch.inf)
            if sinks is not None:
                # one more key, whose value is 0
                column = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
                scores = torch.cat([scores, column], -1)
            lse.append(scores.logsumexp(-1).T)
            weights = scores.softmax(-1).nan_to_num(0.0).to(q.dtype)[..., : len(values)]
            out.append(torch.einsum("hqk,khd->qhd", weights, values))
        return AttnState(torch.cat(out), torch.cat(lse))

    def _scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        """Queries times their factors by position."""
        scaling = self.shape.query_scaling
        if scaling is None:
            return q
        periods = (positions // scaling.period).to(_softmax_dtype(q.dtype))
        return q * (1 + scaling.beta * (1 + periods).log()).to(q.dtype)[:, None, None]

    def _embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        # the model rounds the multiplier to its own dtype, also where a pass is wider
        multiplier = torch.tensor(
            self.shape.embedding_multiplier, dtype=self.weights.embedding.dtype
        )
        return look_up(self.weights.embedding, ids).to(dtype) * multiplier.item()

    def _inputs(self, ids: Tensor, embedded: Tensor) -> Tensor | None:
        """Each layer's further inputs ``[rows, layers, dim]``."""
        weights, shape = self.weights.inputs, self.shape.layer_inputs
        if weights is None or shape is None:
            return None
        size = (len(ids), self.shape.num_layers, shape.dim)
        root = torch.tensor(shape.dim**0.5, dtype=self.weights.embedding.dtype).item()
        own = look_up(weights.embedding, ids).to(embedded.dtype).view(size) * root
        projected = _project(embedded, weights.projection) * self.shape.hidden_size**-0.5
        both: Tensor = (self._norm(projected.view(size), weights.norm) + own) * 0.5**0.5
        return both

    def _branch(self, x: Tensor, norm: Norm | None) -> Tensor:
        normed = x if norm is None else self._norm(x, norm)
        return normed * self.shape.residual_multiplier

    def _stored(self, x: Tensor) -> Tensor:
        stored_in, model_dtype = self._stored_and_own_dtype
        if stored_in is None or x.dtype != model_dtype:
            return x
        # pages store finite numbers only
        limit = torch.finfo(stored_in).max
        return x.clamp(-limit, limit).to(stored_in).to(model_dtype)

    def _rotate(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE: rotates pairs of dims by the layer's own law; queries and keys both carry the
        attention factor."""
        inverse, factor = self._laws[layer]
        wide = _softmax_dtype(x.dtype)
        angles = positions.to(torch.float64)[:, None] * inverse
        cos = (angles.cos() * factor).to(wide)[:, None]
        sin = (angles.sin() * factor).to(wide)[:, None]
        width = 2 * len(inverse)
        pairs, rest = x[..., :width].to(wide), x[..., width:]
        if self.shape.rope.interleaved:
            a, b = pairs[..., 0::2], pairs[..., 1::2]
            rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        else:
            a, b = pairs.chunk(2, -1)
            rotated = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        return torch.cat([rotated.to(x.dtype), rest], -1)

    def _heads(
        self, index: int, layer: LayerWeights, normed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as pages store them; empty keys and values of a layer that
        stores none."""
        shape, own = self.shape, self.shape.heads_of(index)
        if layer.latent is not None:
            return self._latent_heads(layer.latent, _project(normed, layer.qkv))
        heads = _project(normed, layer.qkv).unflatten(1, (-1, own.head_dim))
        q, k = heads.tensor_split([shape.num_qo_heads], 1)
        v = k
        if not own.tied_values:
            k, v = k.chunk(2, 1) if k.shape[1] else (k, v)
        q, k = (
            x if norm is None else self._norm_heads(x, norm)
            for x, norm in ((q, layer.q_norm), (k, layer.k_norm))
        )
        if shape.value_norm:
            v = functional.rms_norm(v, (own.head_dim,), None, shape.norm_eps)
        if (own.num_kv_heads, own.head_dim) == (shape.num_kv_heads, shape.head_dim):
            return q, k, v
        return (
            self._in_stored(index, q, queries=True),
            self._in_stored(index, k),
            self._in_stored(index, v),
        )

    def _norm_heads(self, heads: Tensor, norm: Norm) -> Tensor:
        if not self.shape.joint_qk_norm:
            return self._norm(heads, norm)
        return self._norm(heads.flatten(1), norm).view_as(heads)

    def _halves(self, index: int, head: int, queries: bool) -> tuple[list[int], list[slice]]:
        """The stored heads of a layer's head, and the dims of its halves in them."""
        shape, own = self.shape, self.shape.heads_of(index)
        fit = shape.head_dim // own.head_dim
        fit = fit if own.num_kv_heads % fit == 0 else 1
        kv_head = head * own.num_kv_heads // shape.num_qo_heads if queries else head
        copies = shape.num_kv_heads // (own.num_kv_heads // fit)
        first, half = kv_head // fit * copies, own.head_dim // 2
        start = kv_head % fit * half
        halves = [slice(at + start, at + start + half) for at in (0, shape.head_dim // 2)]
        return [head] if queries else list(range(first, first + copies)), halves

    def _in_stored(self, index: int, heads: Tensor, queries: bool = False) -> Tensor:
        """A layer's heads in the dims of stored heads, zeros elsewhere."""
        shape = self.shape
        count = shape.num_qo_heads if queries else shape.num_kv_heads
        wide = heads.new_zeros(len(heads), count, shape.head_dim)
        for head in range(heads.shape[1]):
            targets, halves = self._halves(index, head, queries)
            for target in targets:
                for dims, part in zip(halves, heads[:, head].chunk(2, -1), strict=True):
                    wide[:, target, dims] = part
        return wide

    def _latent_heads(self, weights: LatentWeights, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries in the space of stored keys; stored keys, which are the values as well."""
        config = self.shape.latent
        assert config is not None, "a layer with latents has their sizes"
        q, latent, rotated = fused.tensor_split((-config.key_dim, -config.rope_dim), 1)
        if weights.query_norm is not None and weights.query_up is not None:
            q = _project(_norm_latent(q, weights.query_norm), weights.query_up)
        q = q.view(len(fused), self.shape.num_qo_heads, config.query_dim)
        keys_of_heads = weights.key_up.to(q.dtype)
        moved = torch.einsum("rhn,hnl->rhl", q[..., : config.nope_dim], keys_of_heads)
        q = torch.cat([q[..., config.nope_dim :], moved], -1)
        k = torch.cat([rotated, _norm_latent(latent, weights.latent_norm)], -1)[:, None]
        return q, k, k

    def _values(self, index: int, layer: LayerWeights, attended: Tensor) -> Tensor:
        """The heads' outputs; with latents, each head maps the latent that it attended to."""
        if self.shape.layer_heads:
            halves = (self._halves(index, n, True)[1] for n in range(self.shape.num_qo_heads))
            own = [
                torch.cat([attended[:, head, dims] for dims in of_head], -1)
                for head, of_head in enumerate(halves)
            ]
            return torch.stack(own, 1)
        if layer.latent is None or self.shape.latent is None:
            return attended
        latents = attended[..., self.shape.latent.rope_dim :]
        return torch.einsum("rhl,hlv->rhv", latents, layer.latent.value_up.to(latents.dtype))

    def _mlp(self, layer: LayerWeights, normed: Tensor, x: Tensor) -> Tensor:
        branch = layer.branch
        if layer.router is not None:
            return self._mixture(layer, layer.router, normed, normed)
        dense = self._gated(normed, layer.gate_up, layer.down)
        if branch is None:
            return dense
        routed = functional.rms_norm(x, x.shape[1:], None, self.shape.norm_eps)
        mixed = self._mixture(branch, branch.router, self._norm(x, branch.input_norm), routed)
        return self._norm(dense, branch.dense_norm) + self._norm(mixed, branch.output_norm)

    def _mixture(
        self, layer: LayerWeights | ExpertBranch, router: Router, normed: Tensor, routed: Tensor
    ) -> Tensor:
        law = self.shape.experts
        assert law is not None, "a layer of experts"
        logits = routed.float() @ router.weight.float().T
        if router.bias is not None:
            logits[:, : law.num_experts] += router.bias
        routes = route(logits, law, router.selection_bias, "reference")
        out = torch.zeros_like(normed)
        for expert in routes.experts.unique().tolist():
            rows, slots = (routes.experts == expert).nonzero(as_tuple=True)
            own = (expert_of(p, expert, law.num_stored) for p in (layer.gate_up, layer.down))
            share = routes.weights[rows, slots, None].to(normed.dtype)
            if isinstance(layer, ExpertBranch):
                share = share * layer.scales[expert].to(normed.dtype)
            out.index_add_(0, rows, self._gated(normed[rows], *own) * share)
        return out

    def _gated(self, normed: Tensor, gate_up: Projection, down: Projection) -> Tensor:
        inner = _project(normed, gate_up)
        if self.shape.activation == "swigluoai":
            limit = self.shape.swiglu_limit
            gate, up = inner.chunk(2, -1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = gate * (self.shape.swiglu_alpha * gate).sigmoid() * (up + 1)
        elif self.shape.gated_mlp:
            gate, up = inner.chunk(2, -1)
            inner = _activate(gate, self.shape) * up
        else:
            inner = _activate(inner, self.shape)
        return _project(inner, down)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        shape, weight = norm.weight.shape, norm.weight
        if weight.itemsize > x.itemsize:
            wide = functional.rms_norm(x.to(weight.dtype), shape, weight, self.shape.norm_eps)
            return wide.to(x.dtype)
        weight = weight.to(x.dtype)
        # head norms are RMS norms, also in models with layer norms
        if self.shape.norm == "rms" or norm.bias is None:
            return functional.rms_norm(x, shape, weight, self.shape.norm_eps)
        return functional.layer_norm(x, shape, weight, norm.bias.to(x.dtype), self.shape.norm_eps)


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the truth for ``dtype``: twice its width."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def _project(x: Tensor, projection: Projection) -> Tensor:
    weight, bias = projection
    return functional.linear(
        x, unpack(weight).to(x.dtype), None if bias is None else bias.to(x.dtype)
    )


def _norm_latent(x: Tensor, norm: Norm) -> Tensor:
    # norms of latents have this epsilon in Transformers, not rms_norm_eps
    weight = norm.weight.to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, 1e-6)


def _activate(x: Tensor, shape: ModelConfig) -> Tensor:
    if shape.activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if shape.activation == "gelu_new" else "none")


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
