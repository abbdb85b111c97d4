"""Laws of gathering: what stood at a slot of a frame stands where a prompt has it, turned on."""

import pytest
import torch
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.ops.gather_kv import UNUSED, KeySources, gather_kv
from looseleaf.ops.page_dtypes import FP8, to_pages
from looseleaf.ops.store_kv import store_kv
from looseleaf_lab.testing.budget import assert_within_budget
from looseleaf_lab.testing.scene import rotation_table, turned_at

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("implementation", ["reference", "triton"])
LAYOUTS = [
    pytest.param(64, 64, False, id="halves"),
    pytest.param(48, 32, True, id="partial-interleaved"),
    pytest.param(80, 0, False, id="no-rotation"),
]
HEADS, PAGES, SIZE, KEYS = 3, 9, 16, 100


def frequencies(rotary_dim: int) -> Tensor:
    return 0.9 ** torch.arange(rotary_dim // 2, dtype=torch.float64, device=DEVICE)


def numbers() -> tuple[Tensor, Tensor]:
    """Sources of 100 slots: any order, one without a source and one that is left alone."""
    generator = torch.Generator().manual_seed(7)
    slots = torch.randperm(PAGES * SIZE, generator=generator)[:KEYS].int()
    slots[5], slots[41] = -1, UNUSED
    turns = torch.randint(0, 400, (KEYS,), generator=generator).int()
    # what is left alone may be told anything: no angle is looked up for it
    turns[41] = 1 << 30
    return slots.to(DEVICE), turns.to(DEVICE)


def pages(head_dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, PAGES, HEADS, SIZE, head_dim, generator=generator).to(DEVICE, dtype)


def gathered(like: Tensor) -> Tensor:
    """Room for more keys than are gathered, and what nobody may touch."""
    return torch.full_like(like[:, :1], 7.0).repeat(1, 4, 1, 4, 1)


@BOTH
@pytest.mark.parametrize(("head_dim", "rotary_dim", "interleaved"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_are_turned_once_more_and_values_copied(
    head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype, implementation: str
) -> None:
    kv = pages(head_dim, dtype)
    out = gathered(kv)
    slots, turns = numbers()
    table = rotation_table(frequencies(rotary_dim), 400, interleaved)
    gather_kv(*kv, KeySources(slots, turns), table, *out, implementation)  # type: ignore[arg-type]
    k, v = (flat.transpose(1, 2).flatten(0, 1) for flat in out)
    rows = slots.clamp(min=0).long()
    old_k, old_v = (flat.transpose(1, 2).flatten(0, 1)[rows] for flat in kv)
    there = slots >= 0
    truth = turned_at(old_k.double(), turns, frequencies(rotary_dim), interleaved)
    plain = turned_at(old_k.float(), turns, frequencies(rotary_dim), interleaved).to(dtype)
    assert_within_budget(k[:KEYS][there], truth[there], plain[there], dtype)
    assert torch.equal(v[:KEYS][there], old_v[there])
    assert not k[5].any() and not v[5].any()
    for untouched in (k[41], v[41], k[KEYS:], v[KEYS:]):
        assert (untouched == 7.0).all()


@BOTH
def test_a_key_moved_is_a_key_stored_there(implementation: str) -> None:
    """Law 1: encoded at 11 of a frame that stands at 60, it is the key at 71."""
    dtype = torch.float64 if implementation == "reference" and DEVICE == "cpu" else torch.float32
    table = rotation_table(frequencies(64), 200, False, dtype)
    key = torch.randn(1, HEADS, 64, dtype=dtype, device=DEVICE)
    stored = torch.zeros(2, 2, 2, HEADS, SIZE, 64, dtype=dtype, device=DEVICE)
    for place, position in enumerate((11, 71)):
        at, slot = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (position, 20))
        store_kv(key, key, at, slot.long(), table, *stored[place], "reference")
    here = torch.tensor([20], dtype=torch.int32, device=DEVICE)
    moved = torch.zeros(2, 1, HEADS, SIZE, 64, dtype=dtype, device=DEVICE)
    sources = KeySources(here, torch.tensor([60], dtype=torch.int32, device=DEVICE))
    gather_kv(*stored[0], sources, table, *moved, implementation)  # type: ignore[arg-type]
    torch.testing.assert_close(moved[:, 0, :, 0], stored[1, :, 1, :, 4])


@BOTH
def test_pages_of_e4m3_are_widened(implementation: str) -> None:
    kv = pages(64, torch.float32)
    narrow = to_pages(kv, FP8)
    slots, turns = numbers()
    table = rotation_table(frequencies(64), 400, False)
    out, expected = gathered(kv), gathered(kv)
    gather_kv(*narrow, KeySources(slots, turns), table, *out, implementation)  # type: ignore[arg-type]
    gather_kv(*narrow.float(), KeySources(slots, turns), table, *expected, "reference")
    torch.testing.assert_close(out, expected)


@BOTH
def test_nothing_is_gathered_of_an_empty_list(implementation: str) -> None:
    kv = pages(64, torch.float32)
    out = gathered(kv)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    table = rotation_table(frequencies(64), 4, False)
    gather_kv(*kv, KeySources(none, none), table, *out, implementation)  # type: ignore[arg-type]
    assert (out == 7.0).all()


@pytest.mark.skipif(DEVICE == "cuda", reason="looking would wait for the device")
@BOTH
def test_a_key_does_not_turn_back(implementation: str) -> None:
    kv, table = pages(64, torch.float32), rotation_table(frequencies(64), 500, False)
    slots, turns = numbers()
    turns[3] = -5
    out = gathered(kv)
    with pytest.raises(InvalidOption, match="negative offset"):
        gather_kv(*kv, KeySources(slots, turns), table, *out, implementation)  # type: ignore[arg-type]
    # where there is no key nothing turns
    slots[3] = -1
    gather_kv(*kv, KeySources(slots, turns), table, *out, implementation)  # type: ignore[arg-type]
