"""What an answer is by definition: all tokens in one dense pass, each seeing what it may see.

A document's tokens see the beginning of the prompt that they are encoded behind, and themselves,
as if they stood right there. All later text sees every token before it, at its true position.
"""

import torch
from torch import Tensor

from looseleaf.config import ModelConfig
from looseleaf.models import Decoder
from looseleaf.prompt.request import DocumentPart, PromptParts
from looseleaf.rope import rope_frequencies, softmax_scale
from looseleaf_lab.testing.scene import turned_at
from tests.models.dense_attend import scaled, sinks_of, softmax


def dense_logits(decoder: Decoder, parts: PromptParts, output: list[int]) -> Tensor:
    """The logits of every token of the prompt and its output."""
    tokens = [token for part in parts for token in part.tokens] + output
    return decoder.logits(
        decoder.forward(torch.tensor(tokens), _Sight(decoder, parts, len(output)))
    )


class _Sight:
    """An attention object over all tokens at once, with a row of visibility for each."""

    def __init__(self, decoder: Decoder, parts: PromptParts, num_output_tokens: int) -> None:
        self.config, self.sinks = decoder.config, sinks_of(decoder)
        total = sum(len(part.tokens) for part in parts) + num_output_tokens
        self.true = torch.arange(total)
        self.encoded = self.true.clone()
        self.in_document = torch.zeros(total, dtype=torch.bool)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.visible = torch.ones(total, total, dtype=torch.bool).tril()
        start = 0
        for part in parts:
            rows = slice(start, start + len(part.tokens))
            if isinstance(part, DocumentPart):
                self.in_document[rows] = True
                self.encoded[rows] -= start - part.context_length
                self.visible[rows, part.context_length : start] = False
            start += len(part.tokens)

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if k is None or v is None:
            k, v = self.layers[self.config.kv_layer(layer)]
        self.layers[layer] = k, v
        group = self.config.num_qo_heads // self.config.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        q = scaled(q, self.encoded, self.config)
        turned_q, turned_k = self.turn(layer, q, self.encoded), self.turn(layer, k, self.true)
        seen_by_text = torch.einsum("qhd,khd->hqk", turned_q, turned_k)
        turned_k = self.turn(layer, k, self.encoded)
        seen_by_document = torch.einsum("qhd,khd->hqk", turned_q, turned_k)
        scores = torch.where(self.in_document[:, None], seen_by_document, seen_by_text)
        visible = self.visible
        if window := self.config.window(layer):
            key_position = torch.where(self.in_document[:, None], self.encoded, self.true)
            visible = visible & (self.encoded[:, None] - key_position < window)
        scores = capped(scores * self.scale(layer), self.config)
        weights = softmax(scores.masked_fill(~visible, -torch.inf), self.sinks[layer])
        return torch.einsum("hqk,khd->qhd", weights, v)

    def scale(self, layer: int) -> float:
        return softmax_scale(self.config, layer)

    def turn(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        rope = self.config.rope_of(layer)
        return turned_at(x, positions, rope_frequencies(rope).inverse, rope.interleaved)


def capped(scores: Tensor, config: ModelConfig) -> Tensor:
    """Scaled scores as the softmax takes them."""
    cap = config.soft_cap
    return cap * torch.tanh(scores / cap) if cap else scores


def blended_logits(
    decoder: Decoder, parts: PromptParts, output: list[int], chosen: list[int]
) -> Tensor:
    """The logits of every token where the tokens at ``chosen`` are computed again, in their place.

    They and all text see fresh keys and values of one another and stored ones of other document
    tokens, as far as these stand before them. Rows of other document tokens mean nothing.
    """
    tokens = [token for part in parts for token in part.tokens] + output
    stored = _Sight(decoder, parts, len(output))
    decoder.forward(torch.tensor(tokens), stored)
    is_row = ~stored.in_document
    is_row[chosen] = True
    rows = is_row.nonzero()[:, 0]
    hidden = decoder.forward(torch.tensor(tokens)[rows], _Blend(stored, rows))
    logits = decoder.logits(hidden)
    spread = torch.full((len(tokens), logits.shape[1]), torch.nan)
    spread[rows] = logits
    return spread


class _Blend:
    """An attention object over some rows, with what another pass stored for the others."""

    def __init__(self, stored: _Sight, rows: Tensor) -> None:
        self.stored, self.rows = stored, rows
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        stored, rows = self.stored, self.rows
        if k is None or v is None:
            keys, values = self.layers[stored.config.kv_layer(layer)]
        else:
            keys, values = (x.clone() for x in stored.layers[layer])
            keys[rows], values[rows] = k, v
        self.layers[layer] = keys, values
        group = q.shape[1] // keys.shape[1]
        keys = stored.turn(layer, keys, stored.true).repeat_interleave(group, 1)
        q = scaled(q, rows, stored.config)
        scores = torch.einsum("qhd,khd->hqk", stored.turn(layer, q, rows), keys)
        scores = capped(scores * stored.scale(layer), stored.config)
        distance = rows[:, None] - stored.true
        visible = distance >= 0
        if window := stored.config.window(layer):
            visible &= distance < window
        weights = softmax(scores.masked_fill(~visible, -torch.inf), stored.sinks[layer])
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))
