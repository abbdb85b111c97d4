"""Documents of a hybrid model: encoded alone behind a lead, then composed in any order.

A full attention layer keeps keys and values, which are rotated to their place. A linear layer keeps
an affine map. Both hold the document as its own tokens and the lead make it, and nothing else."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.hybrids.affine import AffineMap, State, chain
from looseleaf_lab.bench.hybrids.delta_net import DeltaNetLayer
from looseleaf_lab.bench.hybrids.layer import LinearLayer, Projection, Steps, tail_of
from looseleaf_lab.bench.hybrids.mamba2 import MambaLayer


@dataclass(frozen=True)
class LinearPart:
    """A text in one linear layer: its rows before the convolution, and the rows before these."""

    layer: LinearLayer
    projection: Projection
    context: Float[Tensor, "previous channels"]

    @property
    def tail(self) -> Float[Tensor, "previous channels"]:
        """The rows that a convolution after this text reads."""
        return tail_of(self.context, self.projection.channels)

    def steps(self) -> Steps:
        """The tokens as they were encoded."""
        return self.layer.steps(self.projection, self.context)

    def map_after(self, context: Float[Tensor, "previous channels"]) -> AffineMap:
        """The map with other rows before the text: only its first tokens are computed again.

        A document stores the map of the other tokens, and the projections of these."""
        border = min(len(context), len(self.projection.channels))
        first = self.layer.steps(self.projection[:border], context)
        return first.affine_map().then(self.steps()[border:].affine_map())


@dataclass(frozen=True)
class Text:
    """Tokens that a model has read, alone or after another text."""

    tokens: Int[Tensor, " tokens"]
    start: int
    linear: tuple[LinearPart, ...]
    cache: Any
    logits: Float[Tensor, "tokens vocab"]


def linear_layers(model: Any) -> list[tuple[int, LinearLayer]]:
    """Index and reader of each linear layer.

    Raises InvalidOption if there is none that this prototype reads."""
    readers: list[tuple[int, LinearLayer]] = []
    for index, layer in enumerate(model.model.layers):
        if getattr(layer, "linear_attn", None) is not None:
            readers.append((index, DeltaNetLayer(layer.linear_attn)))
        elif getattr(layer, "mamba", None) is not None:
            readers.append((index, MambaLayer(layer.mamba)))
    if not readers:
        raise InvalidOption("the model has no Gated DeltaNet or Mamba-2 layer")
    return readers


@torch.no_grad()
def encode(
    model: Any, tokens: Int[Tensor, " tokens"], lead: Text | None = None, start: int = 0
) -> Text:
    """``tokens`` as Transformers reads them after ``lead``, or from position ``start``."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config) if lead is None else copy.deepcopy(lead.cache)
    start = start if lead is None else lead.start + len(lead.tokens)
    readers = linear_layers(model)
    inputs: list[Tensor] = []
    hooks = [
        reader.module.register_forward_pre_hook(
            lambda _, positional, named: inputs.append(named["hidden_states"]),
            with_kwargs=True,
        )
        for _, reader in readers
    ]
    positions = torch.arange(start, start + len(tokens))[None]
    try:
        # the cache's keyword differs between versions of Transformers, its place does not
        output = model(tokens[None], None, positions, cache, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    parts = []
    for number, (_, reader) in enumerate(readers):
        projection = reader.project(inputs[number][0])
        if lead is None:
            context = projection.channels.new_zeros(
                reader.kernel_size - 1, projection.channels.shape[1]
            )
        else:
            context = lead.linear[number].tail
        parts.append(LinearPart(reader, projection, context))
    return Text(tokens, start, tuple(parts), cache, output.logits[0])


def composed_states(
    lead: Text, documents: Sequence[Text], repair_borders: bool = False
) -> list[State]:
    """Each linear layer's state after the lead and the documents, from maps alone.

    ``repair_borders`` computes each document's first tokens again, with the rows of the text that
    precedes it here in place of the lead's."""
    states = []
    for number, lead_part in enumerate(lead.linear):
        context, maps = lead_part.tail, [lead_part.steps().affine_map()]
        for document in documents:
            part = document.linear[number]
            before = context if repair_borders else part.context
            maps.append(part.map_after(before))
            context = tail_of(before, part.projection.channels)
        states.append(chain(maps).apply(lead_part.layer.empty_state()))
    return states


def recurrent_states(texts: Sequence[Text]) -> list[State]:
    """Each linear layer's state after the texts' tokens as encoded, token by token."""
    states = []
    for number, first in enumerate(texts[0].linear):
        state = first.layer.empty_state()
        for text in texts:
            state = text.linear[number].steps().recurrence(state)
        states.append(state)
    return states


def composed_cache(
    model: Any, lead: Text, documents: Sequence[Text], states: Sequence[State]
) -> Any:
    """Transformers' cache after the lead and the documents, with ``states`` in linear layers."""
    cache = copy.deepcopy(lead.cache)
    place = lead.start + len(lead.tokens)
    for document in documents:
        _append_keys(model, cache, document, place)
        place += len(document.tokens)
    last = documents[-1] if documents else lead
    for number, (index, _) in enumerate(linear_layers(model)):
        cache.update_recurrent_state(states[number][None], index)
        cache.layers[index].conv_states[0].copy_(last.cache.layers[index].conv_states[0])
    return cache


@torch.no_grad()
def answer(
    model: Any,
    lead: Text,
    documents: Sequence[Text],
    states: Sequence[State],
    question: Int[Tensor, " tokens"],
) -> Float[Tensor, "tokens vocab"]:
    """Logits of a question after the lead and the documents, by `composed_cache`."""
    cache = composed_cache(model, lead, documents, states)
    end = lead.start + sum(len(text.tokens) for text in (lead, *documents))
    positions = torch.arange(end, end + len(question))[None]
    logits: Tensor = model(question[None], None, positions, cache, use_cache=True).logits
    return logits[0]


def _append_keys(model: Any, cache: Any, document: Text, place: int) -> None:
    """Append a document's own keys and values, its first token at position ``place``."""
    linear = {index for index, _ in linear_layers(model)}
    for index, layer in enumerate(document.cache.layers):
        if index not in linear:
            keys, values = (
                part[:, :, -len(document.tokens) :] for part in (layer.keys, layer.values)
            )
            cache.update(_rotated(model, keys, place - document.start), values, index)


def _rotated(model: Any, keys: Tensor, distance: int) -> Tensor:
    """Keys moved by ``distance`` positions; a model without RoPE keeps them."""
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is None:
        return keys
    cosine, sine = rotary(keys, torch.tensor([[distance]]))
    turned, rest = keys.split([cosine.shape[-1], keys.shape[-1] - cosine.shape[-1]], -1)
    half, other = turned.chunk(2, -1)
    return torch.cat([turned * cosine + torch.cat([-other, half], -1) * sine, rest], -1)
