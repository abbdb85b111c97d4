"""Rows of ``bench hybrids``: errors of composed states, distance by depth, and sizes on paper.

Weights are random, so distances from full prefill show where it begins, not how answers change."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.hybrids.affine import chain
from looseleaf_lab.bench.hybrids.delta_net import DeltaSteps
from looseleaf_lab.bench.hybrids.documents import (
    Text,
    answer,
    composed_cache,
    composed_states,
    encode,
    linear_layers,
    recurrent_states,
)
from looseleaf_lab.bench.hybrids.shapes import SHAPES
from looseleaf_lab.bench.hybrids.tiny import FAMILIES, VOCAB_SIZE, random_hybrid
from looseleaf_lab.bench.progress import SILENT, Progress
from looseleaf_lab.bench.results import Row

PARTS = ("laws", "heads", "sizes")

Figure = tuple[str, str, float, str]
"""Model, measurement, value, unit."""

_HEADS, _HEAD_DIM = 8, 128
_SHARE = "relative"


@dataclass(frozen=True)
class HybridsConfig:
    """``document_tokens`` of tiny models' documents, and ``head_tokens`` of published heads'."""

    documents: int = 3
    document_tokens: int = 128
    head_tokens: int = 1024
    seed: int = 0
    parts: tuple[str, ...] = PARTS
    families: tuple[str, ...] = FAMILIES

    def __post_init__(self) -> None:
        unknown = set(self.parts) - {*PARTS}
        if unknown:
            raise InvalidOption(f"unknown parts {sorted(unknown)}: choose from {PARTS}")
        strange = set(self.families) - {*FAMILIES}
        if strange:
            raise InvalidOption(f"unknown families {sorted(strange)}: choose from {FAMILIES}")


def measure(config: HybridsConfig, progress: Progress = SILENT) -> Iterator[Row]:
    """One row per figure."""
    for part in config.parts:
        for model, measurement, value, unit in _PARTS[part](config, progress):
            figure: Row = {"measurement": measurement, "value": value, "unit": unit}
            yield {"part": part, "model": model, **figure}


def _laws(config: HybridsConfig, progress: Progress) -> Iterator[Figure]:
    cases = [(family, dtype) for family in config.families for dtype in ("float64", "float32")]
    for family, dtype in progress.over(cases, ", ".join):
        for figure in _tiny_model(config, family, getattr(torch, dtype)):
            yield f"{family}, {dtype}", *figure


def _sizes(config: HybridsConfig, progress: Progress) -> Iterator[Figure]:
    for shape in SHAPES:
        for measurement, (value, unit) in shape.figures().items():
            yield shape.name, measurement, value, unit


@torch.no_grad()
def _tiny_model(
    config: HybridsConfig, family: str, dtype: torch.dtype
) -> Iterator[tuple[str, float, str]]:
    """Errors and distances of one tiny model."""
    model = random_hybrid(family, dtype, config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    lengths = [16, *[config.document_tokens] * config.documents, 8]
    tokens = [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in lengths]
    lead = encode(model, tokens[0])
    documents = [encode(model, each, lead) for each in tokens[1:-1]]
    whole = encode(model, torch.cat(tokens[:-1]))
    composed = composed_states(lead, documents)

    recurrence = recurrent_states([lead, *documents])
    yield "composed state from its recurrence", max(distances(composed, recurrence)), _SHARE

    yield (
        "logits after one document from full prefill",
        _logits_error(model, tokens, lead),
        "logits",
    )

    full = recurrent_states([whole])
    repaired = composed_states(lead, documents, repair_borders=True)
    for borders, states in (("as encoded", composed), ("repaired", repaired)):
        for layer, distance in enumerate(distances(states, full)):
            name = f"state of linear layer {layer} from full prefill, borders {borders}"
            yield name, distance, _SHARE

    cache = composed_cache(model, lead, documents, composed)
    linear = {index for index, _ in linear_layers(model)}
    keys, true_keys = (
        [
            layer.keys[:, :, len(tokens[0]) :]
            for n, layer in enumerate(each.layers)
            if n not in linear
        ]
        for each in (cache, whole.cache)
    )
    yield (
        "keys of documents in full attention from full prefill",
        max(distances(keys, true_keys)),
        _SHARE,
    )


def _logits_error(model: object, tokens: Sequence[Tensor], lead: Text) -> float:
    """A question's logits after one document, against Transformers' pass over all tokens."""
    document, question = tokens[1], tokens[-1]
    part = encode(model, document, lead)
    states = composed_states(lead, [part])
    logits = answer(model, lead, [part], states, question)
    full = encode(model, torch.cat([tokens[0], document, question])).logits[-len(question) :]
    return (logits - full).abs().max().item()


def distances(states: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    """Relative distance of each layer's state, in the Frobenius norm."""
    pairs = zip(states, truth, strict=True)
    return [((state - true).norm() / true.norm()).item() for state, true in pairs]


def _heads(config: HybridsConfig, progress: Progress) -> Iterator[Figure]:
    """Errors at published head sizes, of random keys whose heads forget at different rates."""
    model = f"{_HEADS} heads of {_HEAD_DIM}"
    generator = torch.Generator().manual_seed(config.seed)
    texts = [_random_steps(config.head_tokens, generator) for _ in range(config.documents)]
    empty = torch.zeros(_HEADS, _HEAD_DIM, _HEAD_DIM, dtype=torch.float64)
    truth, plain = empty, empty.float()
    for steps in progress.over(texts, lambda _: "recurrence of a document"):
        truth = steps.recurrence(truth)
        plain = _single(steps).recurrence(plain)
    yield model, "fp32 recurrence, token by token", distances([plain.double()], [truth])[0], _SHARE
    maps = [_single(steps).affine_map() for steps in texts]
    largest = max(each.norms().max().item() for each in maps)
    yield model, "largest singular value of A", largest, _SHARE
    for name, stored in (
        ("fp32 maps", maps),
        ("maps stored in bf16", [each.rounded(torch.bfloat16) for each in maps]),
        ("maps stored in fp16", [each.rounded(torch.float16) for each in maps]),
    ):
        state = chain(stored).apply(empty.float()).double()
        yield model, name, distances([state], [truth])[0], _SHARE


def _random_steps(tokens: int, generator: torch.Generator) -> DeltaSteps:
    shape = _HEADS, tokens, _HEAD_DIM
    key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    decay = torch.logspace(-4, -1, _HEADS, dtype=torch.float64)
    return DeltaSteps(
        key=key / key.norm(dim=2, keepdim=True),
        value=value,
        log_decay=-decay[:, None].expand(-1, tokens),
        beta=torch.rand(shape[:2], generator=generator, dtype=torch.float64),
    )


def _single(steps: DeltaSteps) -> DeltaSteps:
    parts = {each.name: getattr(steps, each.name).float() for each in dataclasses.fields(steps)}
    return DeltaSteps(**parts)


_PARTS: dict[str, Callable[[HybridsConfig, Progress], Iterator[Figure]]] = {
    "laws": _laws,
    "heads": _heads,
    "sizes": _sizes,
}
