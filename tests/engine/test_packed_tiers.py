"""Packed documents in tiers: the same answers from three quarters of the bytes, and what can't be
packed is kept as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from looseleaf.errors import InvalidOption
from tests.checkpoints import make_checkpoint, make_model, write_checkpoint
from tests.engine.tiered import PARAMS, forget_pool, load_always, prompts, sources, tiered

# pages of whole blocks
WIDE = {"head_dim": 64}


def answers(llm: Any) -> tuple[list[tuple[int, ...]], set[str]]:
    """The tokens of all answers, and where their documents came from."""
    outputs = llm.generate(prompts(), PARAMS)
    llm.engine.check()
    return [o.token_ids for o in outputs], {s for o in outputs for s in sources(o)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama", **WIDE)


@pytest.mark.parametrize("way", ["host", "disk"])
def test_packed_documents_give_the_same_answers_from_fewer_bytes(
    folder: Path, tmp_path: Path, way: str
) -> None:
    right, _ = answers(tiered(folder, dtype="bfloat16"))
    stored = {}
    for packing in ("on", "off"):
        place: dict[str, Any] = {"host_gib": 0.02} if way == "host" else {}
        disk = tmp_path / packing if way == "disk" else None
        llm = tiered(folder, disk, dtype="bfloat16", tier_packing=packing, **place)
        load_always(llm)
        assert answers(llm)[0] == right
        forget_pool(llm)
        again, found = answers(llm)
        assert again == right and found >= {"loaded"} and "computed" not in found
        assert llm.engine.tiers is not None
        (state,) = llm.engine.tiers.snapshot()
        assert state.counters.loads and not state.counters.faults
        stored[packing] = state.num_bytes or 0
        llm.close()
    assert stored["on"] < 0.8 * stored["off"]


@pytest.mark.parametrize("writer, reader", [("on", "off"), ("off", "on")])
def test_an_engine_reads_what_another_packed_or_did_not(
    folder: Path, tmp_path: Path, writer: str, reader: str
) -> None:
    right, found = answers(tiered(folder, tmp_path / "c", dtype="bfloat16", tier_packing=writer))
    assert "computed" in found
    llm = tiered(folder, tmp_path / "c", dtype="bfloat16", tier_packing=reader, host_gib=0.02)
    load_always(llm)
    again, found = answers(llm)
    assert again == right and "loaded" in found and "computed" not in found
    forget_pool(llm)
    # and from the memory of the host, where it stays as it came
    assert answers(llm)[0] == right
    assert llm.engine.tiers is not None
    assert llm.engine.tiers.counters["host"].loads == 4
    llm.close()


def test_documents_that_can_not_be_packed_are_kept_as_they_are(tmp_path: Path) -> None:
    model = make_model("llama", **WIDE)
    with torch.no_grad():
        for layer in model.model.layers:
            # every other value of a head is smaller than four bits of exponent can say
            layer.self_attn.v_proj.weight[::2] *= 2.0**-30
            layer.self_attn.v_proj.bias[::2] *= 2.0**-30
    folder = write_checkpoint(tmp_path / "model", model)
    right, _ = answers(tiered(folder, dtype="bfloat16"))
    llm = tiered(folder, dtype="bfloat16", tier_packing="on", host_gib=0.02)
    load_always(llm)
    assert answers(llm)[0] == right
    forget_pool(llm)
    again, found = answers(llm)
    assert again == right and "computed" not in found and "loaded" in found
    assert llm.engine.tiers is not None and llm.engine.tiers.host is not None
    host, copy = llm.engine.tiers.host, llm.engine.tiers.copy
    for entry in host.entries():
        opened = host.open(entry.key)
        assert opened is not None and not opened.record.packed
        pages = opened.record.layer_shape[1]
        assert copy.record(entry.key, opened.record.length, pages).packed
        opened.close()
    llm.close()


def test_packing_that_is_asked_for_and_can_not_be_is_refused_with_advice(folder: Path) -> None:
    with pytest.raises(InvalidOption, match=r"tier_packing='on'.*use auto"):
        tiered(folder, dtype="float32", tier_packing="on", host_gib=0.01)
