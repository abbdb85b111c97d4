"""What an answer is by definition: all tokens in one dense pass, in plain PyTorch.

A second opinion. It shares weights and RoPE frequencies with what it judges, and nothing else: no
operator of `looseleaf.ops`, no pages, no frames, no merge. In a wide dtype it is the truth; in the
engine's own it is the plain implementation whose error sets the budget.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from looseleaf.config import ModelConfig
from looseleaf.llm.load import LoadedModel
from looseleaf.models.layers import LayerWeights, Norm
from looseleaf.models.linear import Projection, unpack
from looseleaf.prompt.request import DocumentPart, PromptParts
from looseleaf.rope import rope_frequencies
from looseleaf.types import AttnState

# rows whose scores are held at once
_ROWS = 256
SHIFTS = (0, 11, 23)
"""How far tokens are moved together for samples of rounding: attention does not change by it."""


@dataclass(frozen=True, eq=False)
class Reading:
    """Rows that see some keys, by the causal rule over ``row_positions`` and ``key_positions``.

    ``rows`` are indices of the rows of a pass, ``keys`` of all tokens; all four are int64.
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
    """Dense passes over a loaded model; they run where its weights are."""

    def __init__(self, loaded: LoadedModel, stored_in: torch.dtype | None = None) -> None:
        """With ``stored_in``, passes in the model's own dtype round keys and values to it, as the
        pages of an engine do; wider passes do not."""
        self.shape = loaded.shape
        self._narrow = stored_in, loaded.decoder.dtype
        self.weights = loaded.decoder.weights
        self.device = loaded.decoder.device
        laws = (rope_frequencies(loaded.shape.rope_of(n)) for n in range(loaded.shape.num_layers))
        self._laws = [law._replace(inverse=law.inverse.to(self.device)) for law in laws]

    def full(self, tokens: list[int]) -> list[Reading]:
        """Every token sees all before it."""
        at = torch.arange(len(tokens), device=self.device)
        return [Reading(at, at, at, at)]

    def reused(self, parts: PromptParts, num_more: int) -> list[Reading]:
        """A document's tokens see their context and themselves, as if they stood right behind it;
        text, and ``num_more`` tokens behind the prompt, sees everything before it."""
        documents, text, start = [], [], 0
        for part in parts:
            at = torch.arange(start, start + len(part.tokens), device=self.device)
            start += len(part.tokens)
            if not isinstance(part, DocumentPart):
                text.append(at)
                continue
            seen = torch.arange(part.context_length, device=self.device)
            own = torch.arange(len(at), device=self.device) + part.context_length
            keys = torch.cat([seen, at])
            documents.append(Reading(at, keys, own, torch.cat([seen, own])))
        rest = torch.arange(start, start + num_more, device=self.device)
        rows, every = torch.cat([*text, rest]), torch.arange(start + num_more, device=self.device)
        return [*documents, Reading(rows, every, rows, every)]

    @torch.inference_mode()
    def hidden(
        self,
        tokens: list[int],
        readings: list[Reading],
        dtype: torch.dtype,
        *,
        shift: int = 0,
        keep: HeadStates | None = None,
        stored: HeadStates | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """The normed hidden states behind the last layer, computed in ``dtype``.

        ``keep`` collects what every layer makes of its rows. With ``rows`` only these tokens are
        computed, and see ``stored`` keys and values of the others."""
        ids = torch.tensor(tokens, device=self.device)
        x = self._embed(ids if rows is None else ids[rows], dtype)
        for index, layer in enumerate(self.weights.layers):
            normed = x if layer.input_norm is None else self._norm(x, layer.input_norm)
            q, k, v = self._heads(layer, normed)
            if keep is not None:
                keep.layers[index] = q, k, v
            if stored is not None and rows is not None:
                _, old_k, old_v = stored.layers[index]
                k, v = old_k.index_copy(0, rows, k), old_v.index_copy(0, rows, v)
            attended = torch.empty_like(q)
            for reading in readings:
                attended[reading.rows] = self.state(
                    index, q[reading.rows], k[reading.keys], v[reading.keys],
                    (reading.row_positions, reading.key_positions), shift,
                ).out  # fmt: skip
            attended = _project(attended.flatten(1), layer.output)
            x = x + self._branch(attended, layer.output_norm)
            if not self.shape.parallel_residual:
                normed = x if layer.mlp_norm is None else self._norm(x, layer.mlp_norm)
            x = x + self._branch(self._mlp(layer, normed), layer.down_norm)
        return self._norm(x, self.weights.final_norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary of some rows."""
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
    ) -> AttnState:
        """Softmax attention of ``q`` over all of ``k`` and ``v`` that stand at its position or
        before, turned to where they truly stand, in the dtype of ``q``, softmax at least in fp32;
        with its log-sum-exp ``[rows, heads]``, and ``(0, -inf)`` where nothing is seen."""
        row_positions, key_positions = positions
        group = self.shape.num_qo_heads // self.shape.num_kv_heads
        turned = self._stored(self._turn(layer, k, key_positions + shift)).repeat_interleave(
            group, 1
        )
        values = self._stored(v).repeat_interleave(group, 1)
        scale, window, cap = (
            self.shape.softmax_scale or self.shape.head_dim**-0.5,
            self.shape.window(layer),
            self.shape.soft_cap,
        )
        out, lse = [], []
        for at, block in zip(row_positions.split(_ROWS), q.split(_ROWS), strict=True):
            scores = torch.einsum("qhd,khd->hqk", self._turn(layer, block, at + shift), turned)
            scores = scores.to(_softmax_dtype(q.dtype)) * scale
            if cap:
                scores = cap * (scores / cap).tanh()
            distance = at[:, None] - key_positions
            visible = (distance >= 0) & (distance < window) if window else distance >= 0
            scores = scores.masked_fill(~visible, -torch.inf)
            lse.append(scores.logsumexp(-1).T)
            weights = scores.softmax(-1).nan_to_num(0.0).to(q.dtype)
            out.append(torch.einsum("hqk,khd->qhd", weights, values))
        return AttnState(torch.cat(out), torch.cat(lse))

    def _embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        # the multiplier is a number of the model's dtype, whatever computes with it
        own = torch.tensor(self.shape.embedding_multiplier, dtype=self.weights.embedding.dtype)
        return self.weights.embedding[ids].to(dtype) * own.item()

    def _branch(self, x: Tensor, norm: Norm | None) -> Tensor:
        normed = x if norm is None else self._norm(x, norm)
        return normed * self.shape.residual_multiplier

    def _stored(self, x: Tensor) -> Tensor:
        stored_in, own = self._narrow
        if stored_in is None or x.dtype != own:
            return x
        # a page holds finite numbers only
        most = torch.finfo(stored_in).max
        return x.clamp(-most, most).to(stored_in).to(own)

    def _turn(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE as the papers write it: pairs of dims turn by their angle, the attention factor on
        both sides of the score; by the layer's own law."""
        inverse, factor = self._laws[layer]
        wide = _softmax_dtype(x.dtype)
        angles = positions.to(torch.float64)[:, None] * inverse
        cos = (angles.cos() * factor).to(wide)[:, None]
        sin = (angles.sin() * factor).to(wide)[:, None]
        width = 2 * len(inverse)
        turning, rest = x[..., :width].to(wide), x[..., width:]
        if self.shape.rope.interleaved:
            a, b = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        else:
            a, b = turning.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        return torch.cat([turned.to(x.dtype), rest], -1)

    def _heads(self, layer: LayerWeights, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        counts = (shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads)
        heads = _project(normed, layer.qkv).view(len(normed), sum(counts), shape.head_dim)
        q, k, v = heads.split_with_sizes(counts, 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            flat = (x.flatten(1) if shape.joint_qk_norm else x for x in (q, k))
            norms = Norm(layer.q_norm), Norm(layer.k_norm)
            q, k = (
                self._norm(x, norm).view(len(normed), -1, shape.head_dim)
                for x, norm in zip(flat, norms, strict=True)
            )
        return q, k, v

    def _mlp(self, layer: LayerWeights, normed: Tensor) -> Tensor:
        inner = _project(normed, layer.gate_up)
        if self.shape.gated_mlp:
            gate, up = inner.chunk(2, -1)
            inner = _activate(gate, self.shape) * up
        else:
            inner = _activate(inner, self.shape)
        return _project(inner, layer.down)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        shape, weight = norm.weight.shape, norm.weight
        if weight.itemsize > x.itemsize:
            wide = functional.rms_norm(x.to(weight.dtype), shape, weight, self.shape.norm_eps)
            return wide.to(x.dtype)
        weight = weight.to(x.dtype)
        # a norm of heads is a norm of their dims, whatever the model's other norms are
        if self.shape.norm == "rms" or norm.bias is None:
            return functional.rms_norm(x, shape, weight, self.shape.norm_eps)
        return functional.layer_norm(x, shape, weight, norm.bias.to(x.dtype), self.shape.norm_eps)


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a truth about ``dtype`` is computed: twice its width."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def _project(x: Tensor, projection: Projection) -> Tensor:
    weight, bias = projection
    return functional.linear(
        x, unpack(weight).to(x.dtype), None if bias is None else bias.to(x.dtype)
    )


def _activate(x: Tensor, shape: ModelConfig) -> Tensor:
    if shape.activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if shape.activation == "gelu_new" else "none")


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
