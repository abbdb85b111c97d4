"""Token choices with full knowledge: an upper bound for selectors at a share.

Two dense passes give every layer's keys and values, once with full visibility and once with
documents that see only their context. A token's deviation in a layer is the relative change of its
keys plus that of its values. ``deviation`` is the sum over layers. ``read`` weighs each layer's
deviation by the attention that the token receives from the text after the documents, ``received``
by the attention from all later rows. For evaluation only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looseleaf.blend.candidates import Candidates
from looseleaf.blend.selectors.base import Evidence, Selector
from looseleaf.config import ModelConfig
from looseleaf.engine.sequence import Sequence
from looseleaf.errors import InvalidOption
from looseleaf.models import Decoder
from looseleaf.prompt.request import DocumentPart, PromptParts
from looseleaf.rope import rope_frequencies, softmax_scale
from looseleaf_lab.testing.scene import turned_at

Ceiling = Literal["deviation", "read", "received"]
CEILINGS: tuple[Ceiling, ...] = ("deviation", "read", "received")
Scores = Float[Tensor, " tokens"]


@dataclass(frozen=True)
class GivenTokens(Selector):
    """Chooses the ``num_given`` candidates with the highest given scores."""

    evidence: ClassVar[Evidence] = "none"
    scores: Scores
    num_given: int

    def select(self, candidates: Candidates, scores: Scores) -> Int[Tensor, " kept"]:
        own = self.scores[candidates.positions]
        return own.topk(min(self.num_given, len(own))).indices.sort().values


def give_tokens(sequence: Sequence, scores: Scores) -> None:
    """Replace the selector of a waiting sequence by one with these scores of prompt tokens."""
    fusion = sequence.fusion
    if fusion is not None:
        fusion.selector = GivenTokens(scores, fusion.most)


def ceiling_scores(model: Decoder, parts: PromptParts) -> Mapping[Ceiling, Scores]:
    """The scores of every prompt token, fp32 on the host; zero outside of documents.

    Raises InvalidOption for a model with windows or capped scores."""
    config = model.config
    if config.soft_cap or any(map(config.window, range(config.num_layers))):
        raise InvalidOption("ceilings are for models without windows and capped scores")
    tokens = torch.tensor([token for part in parts for token in part.tokens], device=model.device)
    full, apart = _Pass.of(config, parts, together=True), _Pass.of(config, parts, together=False)
    model.forward(tokens, full)
    model.forward(tokens, apart)
    totals = {name: torch.zeros(len(tokens)) for name in CEILINGS}
    for layer in range(config.num_layers):
        changes = zip(full.kept[layer], apart.kept[layer], strict=True)
        change = sum((_relative_change(new, old) for new, old in changes), torch.zeros(len(tokens)))
        totals["deviation"] += change
        totals["read"] += change * full.read[layer]
        totals["received"] += change * full.received[layer]
    is_document = apart.in_document
    return {name: total * is_document for name, total in totals.items()}


def _relative_change(fresh: Tensor, stored: Tensor) -> Scores:
    fresh, stored = fresh.flatten(1), stored.flatten(1)
    change: Tensor = (fresh - stored).norm(dim=1) / stored.norm(dim=1).clamp_min(1e-12)
    return change


@dataclass(eq=False)
class _Pass:
    """Dense attention over all tokens of a prompt, which keeps keys, values and weights.

    ``read`` and ``received`` are, by layer, the weight that a key gets from the last text and from
    all rows, as the mean over heads."""

    config: ModelConfig
    positions: Int[Tensor, " tokens"]
    visible: Tensor
    in_document: Tensor
    first_last: int
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    read: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ModelConfig, parts: PromptParts, *, together: bool) -> "_Pass":
        """The pass of a prompt; without ``together`` documents see only their context."""
        total = sum(len(part.tokens) for part in parts)
        positions = torch.arange(total)
        visible = torch.ones(total, total, dtype=torch.bool).tril()
        in_document = torch.zeros(total, dtype=torch.bool)
        start = 0
        for part in parts:
            rows = slice(start, start + len(part.tokens))
            if isinstance(part, DocumentPart):
                in_document[rows] = True
                if not together:
                    positions[rows] -= start - part.context_length
                    visible[rows, part.context_length : start] = False
            start += len(part.tokens)
        return cls(config, positions, visible, in_document, total - len(parts[-1].tokens))

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        assert k is not None and v is not None, "every layer stores keys and values"
        self.kept[layer] = k.float().cpu(), v.float().cpu()
        device, group = q.device, q.shape[1] // k.shape[1]
        rope = self.config.rope_of(layer)
        inverse = rope_frequencies(rope).inverse.to(device)
        places = self.positions.to(device)
        queries = turned_at(q.float(), places, inverse, rope.interleaved)
        keys = turned_at(k.float(), places, inverse, rope.interleaved)
        keys = keys.repeat_interleave(group, 1)
        values = v.float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale(self.config, layer)
        weights = scores.masked_fill(~self.visible.to(device), -torch.inf).softmax(-1)
        by_row = weights.mean(0)
        self.received[layer] = by_row.sum(0).cpu()
        self.read[layer] = by_row[self.first_last :].sum(0).cpu()
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
