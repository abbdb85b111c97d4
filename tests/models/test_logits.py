"""Law 8: logits agree with Transformers, for every family and RoPE law, however the rows are split."""

import dataclasses
from pathlib import Path

import pytest
import torch

from looseleaf.models import Decoder, load_weights, read_config
from tests.checkpoints import FAMILIES, ROPE_LAWS, make_checkpoint, make_model, supports
from tests.models.dense_attend import DenseAttend

TOLERANCE = 1e-4
LENGTH = 48
PAIRS = [(family, law) for family in FAMILIES for law in ROPE_LAWS if supports(family, law)]


def load(folder: Path, length: int) -> Decoder:
    config = read_config(folder)
    config = dataclasses.replace(config, rope=dataclasses.replace(config.rope, length=length))
    return Decoder(config, load_weights(folder, config, torch.float32))


def logits_in_chunks(decoder: Decoder, tokens: torch.Tensor, chunk: int) -> torch.Tensor:
    attend, logits = DenseAttend(decoder.config), []
    for start in range(0, len(tokens), chunk):
        rows = tokens[start : start + chunk]
        attend.positions = torch.arange(start, start + len(rows))
        logits.append(decoder.logits(decoder.forward(rows, attend)))
    return torch.cat(logits)


def worst(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).abs().max())


@pytest.mark.parametrize(("family", "law"), PAIRS)
def test_logits_equal_transformers_in_prefill_chunks_and_decode(
    family: str, law: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, law)
    tokens = torch.randint(0, 320, (LENGTH,), generator=torch.Generator().manual_seed(1))
    model = make_model(family, law)
    with torch.inference_mode():
        reference = model(tokens[None]).logits[0]
    decoder = load(folder, LENGTH)
    for chunk in (LENGTH, 7, 1):
        assert worst(logits_in_chunks(decoder, tokens, chunk), reference) <= TOLERANCE
