"""Blending as plainly as it can be written: one request, dense attention, exact masks, fp32.

Keys are kept turned to their true positions. What the engine does with pages, patches and masks
must agree with this."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from looseleaf.blend import (
    Candidates,
    Chase,
    Links,
    Oracle,
    Question,
    Selector,
    kv_deviation,
)
from looseleaf.models import Decoder
from looseleaf.rope import layer_rotations, softmax_scale
from looseleaf.types import LayerHook


@dataclass(frozen=True)
class Prompt:
    """A lead, documents, and a text behind them."""

    lead: list[int]
    documents: list[list[int]]
    text: list[int]

    @property
    def tokens(self) -> Tensor:
        return torch.tensor([*self.lead, *(t for d in self.documents for t in d), *self.text])

    @property
    def parts(self) -> Tensor:
        """The number of the part that each token stands in: the lead is 0."""
        lengths = torch.tensor([len(p) for p in (self.lead, *self.documents, self.text)])
        return torch.arange(len(lengths)).repeat_interleave(lengths)

    @property
    def candidates(self) -> Candidates:
        start, stop = len(self.lead), len(self.tokens) - len(self.text)
        return Candidates(torch.arange(start, stop), self.parts[start:stop], (stop - start,))


@dataclass
class Pass:
    """One pass over some rows, and what it did: the attention object that a decoder calls."""

    blend: "DenseBlend"
    keys: list[Tensor]
    values: list[Tensor]
    positions: Tensor
    rows: Tensor | None = None  # those of `positions` that this layer computes; None: all
    queries: dict[int, Tensor] = field(default_factory=dict)
    lse: dict[int, Tensor] = field(default_factory=dict)
    fresh: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        assert k is not None and v is not None, "every layer stores keys and values"
        at = self.positions if self.rows is None else self.positions[self.rows]
        q, k = self.blend.turn(layer, q, at), self.blend.turn(layer, k, at)
        self.queries[layer], self.fresh[layer] = q, (k, v)
        end = int(at[-1]) + 1
        keys, values = self.keys[layer][:end].clone(), self.values[layer][:end].clone()
        keys[at], values[at] = k, v
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->qhk", q, keys.repeat_interleave(group, 1))
        scores = scores * self.blend.scales[layer]
        scores = scores.masked_fill((at[:, None] < torch.arange(end))[:, None], -torch.inf)
        self.lse[layer] = scores.logsumexp(-1)
        return torch.einsum("qhk,khd->qhd", scores.softmax(-1), values.repeat_interleave(group, 1))


class DenseBlend:
    """One prompt: its documents encoded behind the lead, each by itself, then passes over rows."""

    def __init__(self, model: Decoder, prompt: Prompt) -> None:
        self.model, self.prompt = model, prompt
        config = model.config
        self.scales = [softmax_scale(config, n) for n in range(config.num_layers)]
        self.rotations = layer_rotations(config, config.max_position_embeddings)
        self.tokens, self.candidates = prompt.tokens, prompt.candidates
        shape = (config.num_layers, len(self.tokens), config.num_kv_heads, config.head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        start = len(prompt.lead)
        for document in prompt.documents:
            self._store(document, start)
            start += len(document)
        self.text_rows = torch.arange(start, len(self.tokens))

    def turn(self, layer: int, x: Tensor, positions: Tensor, back: bool = False) -> Tensor:
        rotation = self.rotations[layer]
        half = rotation.rotary_dim // 2
        cos, sin = rotation.cos[positions][:, None], rotation.sin[positions][:, None]
        sin = -sin if back else sin
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def _store(self, document: list[int], start: int) -> None:
        lead = len(self.prompt.lead)
        tokens = torch.tensor([*self.prompt.lead, *document])
        empty = torch.zeros_like(self.keys[:, : len(tokens)])
        done = Pass(self, list(empty), list(empty), torch.arange(len(tokens)))
        self.model.forward(tokens, done)
        true = torch.cat((torch.arange(lead), torch.arange(start, start + len(document))))
        for layer, (k, v) in done.fresh.items():
            unturned = self.turn(layer, k, torch.arange(len(tokens)), back=True)
            self.keys[layer, true] = self.turn(layer, unturned, true)
            self.values[layer, true] = v

    def run(
        self, positions: Tensor, hook: LayerHook | None = None, done: Pass | None = None
    ) -> tuple[Tensor, Pass]:
        """Hidden states of the rows at ``positions`` that are left at the end, and the pass."""
        done = done or Pass(self, list(self.keys), list(self.values), positions)
        return self.model.forward(self.tokens[positions], done, hook), done

    def rows(self, chosen: Tensor) -> Tensor:
        """Positions of the chosen candidates and of the text."""
        return torch.cat((self.candidates.positions[chosen], self.text_rows))

    def received(self, done: Pass, layers: range, weight: Tensor | None = None) -> Tensor:
        """The largest weight that each candidate gets in ``layers`` from any head of rows that
        stand in later parts."""
        at = done.positions
        ones = torch.ones(len(at)) if weight is None else weight
        later = self.candidates.documents < self.prompt.parts[at][:, None]
        best = torch.zeros(len(self.candidates))
        for layer in layers:
            keys, q = self.keys[layer, self.candidates.positions], done.queries[layer]
            group = q.shape[1] // keys.shape[1]
            scores = torch.einsum("rhd,nhd->rhn", q, keys.repeat_interleave(group, 1))
            scores = scores * self.scales[layer] - done.lse[layer][..., None]
            shares = (scores.exp() * ones[:, None, None]).masked_fill(~later[:, None], 0.0)
            best = torch.maximum(best, shares.amax((0, 1)))
        return best

    def question_scores(self, question: Question, num_text: int | None = None) -> Tensor:
        """The question's evidence; ``num_text`` leaves out what follows the prompt's own text."""
        rows = self.text_rows[:num_text]
        _, done = self.run(rows)
        num_layers = self.model.config.num_layers
        watched = [i for i in range(num_layers) if question.watches(i, num_layers)]
        return self.received(done, range(watched[0], num_layers))

    def chase(self, links: Links, num_text: int | None = None) -> Chase:
        """All rounds of a chase, each with a pass over the scouts alone."""
        scores = self.question_scores(links, num_text)
        chase = links.begin(self.candidates, scores)
        depth = links.scout_layers(self.model.config.num_layers)
        for _ in range(links.rounds):
            if not len(chase.scouts):
                break
            _, done = self.run(self.candidates.positions[chase.scouts])
            strength = self.received(done, range(depth), chase.importance[chase.scouts])
            chase = links.follow(self.candidates, chase, strength)
        return chase

    def true_deviation(self) -> Tensor:
        """Of every candidate from a full prefill of all documents and text, over all layers."""
        at = self.candidates.positions
        rows = self.rows(torch.arange(len(at)))
        _, done = self.run(rows)
        layers = [
            kv_deviation(done.fresh[n][0][: len(at)], done.fresh[n][1][: len(at)], k[at], v[at])
            for n, (k, v) in enumerate(zip(self.keys, self.values, strict=True))
        ]
        return torch.stack(layers).sum(0)

    def choose(self, selector: Selector, num_text: int | None = None) -> Tensor:
        """What a selector chooses that needs no row filter."""
        scores = torch.zeros(len(self.candidates))
        if isinstance(selector, Links):
            scores = self.chase(selector, num_text).scores
        elif isinstance(selector, Question):
            scores = self.question_scores(selector, num_text)
        elif isinstance(selector, Oracle):
            scores = self.true_deviation()
        return selector.select(self.candidates, scores)
