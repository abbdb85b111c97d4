"""A document is an affine map of a linear layer's state: laws on tiny random hybrids."""

import dataclasses
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.hybrids.affine import AffineMap, chain
from looseleaf_lab.bench.hybrids.documents import (
    LinearPart,
    Text,
    answer,
    composed_states,
    encode,
    linear_layers,
    recurrent_states,
)
from looseleaf_lab.bench.hybrids.rows import distances
from looseleaf_lab.bench.hybrids.tiny import FAMILIES, VOCAB_SIZE, random_hybrid

pytestmark = pytest.mark.filterwarnings("ignore:.*falling back.*")
# a lead, documents longer than a chunk and shorter than a convolution's kernel, and a question
LENGTHS = {"lead": 9, "long": 66, "other": 12, "short": 2, "question": 5}


@dataclasses.dataclass(frozen=True)
class Scene:
    """A model and its texts; documents are encoded alone behind the lead."""

    model: Any
    tokens: dict[str, Tensor]
    lead: Text
    documents: dict[str, Text]


@cache
def scene(family: str, dtype: torch.dtype = torch.float64) -> Scene:
    model = random_hybrid(family, dtype)
    generator = torch.Generator().manual_seed(1)
    tokens = {
        name: torch.randint(VOCAB_SIZE, (length,), generator=generator)
        for name, length in LENGTHS.items()
    }
    lead = encode(model, tokens["lead"])
    names = ("long", "other", "short")
    return Scene(model, tokens, lead, {name: encode(model, tokens[name], lead) for name in names})


def random_state(part: LinearPart) -> Tensor:
    empty = part.layer.empty_state()
    return torch.randn(empty.shape, dtype=empty.dtype, generator=torch.Generator().manual_seed(2))


def budget(tokens: int, dtype: torch.dtype) -> float:
    """Each update may round once."""
    return tokens * torch.finfo(dtype).eps


ORDERS = [("long", "other", "short"), ("short", "other", "long")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_documents_map_is_its_recurrence_from_any_state(family: str) -> None:
    for part in scene(family).documents["long"].linear:
        state = random_state(part)
        expected = part.steps().recurrence(state)
        actual = part.steps().affine_map().apply(state)
        assert distances([actual], [expected])[0] < budget(LENGTHS["long"], state.dtype)
        # neither half of the map is idle
        assert part.steps().affine_map().norms().max() > 0.05
        assert part.steps().affine_map().offset.norm() > 0.05


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_maps_compose_to_the_recurrence_over_documents_encoded_alone(
    family: str, order: tuple[str, ...], dtype: torch.dtype
) -> None:
    case = scene(family, dtype)
    documents = [case.documents[name] for name in order]
    states = composed_states(case.lead, documents)
    truth = recurrent_states([case.lead, *documents])
    tokens = sum(LENGTHS[name] for name in ("lead", *order))
    assert max(distances(states, truth)) < budget(tokens, dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_composition_associates_and_order_matters(family: str) -> None:
    case = scene(family)
    for number in range(len(case.lead.linear)):
        lead, long, other = (
            text.linear[number].steps().affine_map()
            for text in (case.lead, case.documents["long"], case.documents["other"])
        )
        left, right = lead.then(long).then(other), lead.then(long.then(other))
        assert distances([left.offset], [right.offset])[0] < budget(4, torch.float64)
        assert distances([left.offset], [lead.then(other).then(long).offset])[0] > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_a_map_never_enlarges_a_state(family: str) -> None:
    for text in scene(family).documents.values():
        for part in text.linear:
            assert part.steps().affine_map().norms().max() <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_map_has_no_position(family: str) -> None:
    case = scene(family)
    lead = encode(case.model, case.tokens["lead"], start=50)
    moved = encode(case.model, case.tokens["long"], lead)
    for there, here in zip(moved.linear, case.documents["long"].linear, strict=True):
        for name in ("transition", "offset"):
            maps = [part.steps().affine_map() for part in (there, here)]
            near, far = (getattr(each, name) for each in maps)
            # Transformers computes states, norms and angles in fp32 whatever the model's dtype
            assert distances([near], [far])[0] < budget(LENGTHS["long"], torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_transformers(family: str) -> None:
    case = scene(family)
    states = recurrent_states([case.lead, case.documents["long"]])
    cache = case.documents["long"].cache
    theirs = [cache.layers[index].recurrent_states[0][0] for index, _ in linear_layers(case.model)]
    tokens = LENGTHS["lead"] + LENGTHS["long"]
    assert max(distances(theirs, states)) < budget(tokens, torch.float32)


@pytest.mark.parametrize("start", [0, 50])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_document_encoded_anywhere_answers_as_full_prefill(family: str, start: int) -> None:
    case = scene(family, torch.float32)
    question = case.tokens["question"]
    elsewhere = encode(case.model, case.tokens["lead"], start=start)
    document = encode(case.model, case.tokens["long"], elsewhere)
    states = composed_states(case.lead, [document])
    actual = answer(case.model, case.lead, [document], states, question)
    names = ("lead", "long", "question")
    whole = encode(case.model, torch.cat([case.tokens[name] for name in names]))
    plain = encode(case.model, question, case.documents["long"]).logits
    truth = whole.logits[-len(question) :]
    # twice the difference of two of Transformers' own passes, and a rounding step
    step = truth.abs().max() * torch.finfo(torch.float32).eps
    assert (actual - truth).abs().max() <= 2 * (plain - truth).abs().max() + 16 * step


@pytest.mark.parametrize("family", FAMILIES)
def test_repaired_borders_are_exact_in_the_first_layer_only(family: str) -> None:
    case = scene(family)
    order = ("long", "short", "other")
    documents = [case.documents[name] for name in order]
    tokens = torch.cat([case.tokens[name] for name in ("lead", *order)])
    full = recurrent_states([encode(case.model, tokens)])
    repaired = distances(composed_states(case.lead, documents, repair_borders=True), full)
    encoded = distances(composed_states(case.lead, documents), full)
    assert repaired[0] < budget(len(tokens), torch.float64)
    assert encoded[0] > 1e-4
    assert min(repaired[1:]) > 1e-2


def test_a_model_without_linear_layers_is_refused() -> None:
    model = SimpleNamespace(model=SimpleNamespace(layers=[nn.Linear(2, 2)]))
    with pytest.raises(InvalidOption, match="no Gated DeltaNet or Mamba-2 layer"):
        linear_layers(model)


def test_rounding_keeps_the_dtype_and_loses_digits() -> None:
    exact = AffineMap(torch.full((1, 2, 2), 1 / 3), torch.full((1, 2, 4), 1 / 3))
    stored = exact.rounded(torch.bfloat16)
    assert stored.offset.dtype == torch.float32
    assert 0 < (stored.offset - exact.offset).abs().max() < 1 / 256
    assert chain([exact]) is exact
