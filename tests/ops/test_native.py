"""The C kernels answer to the references: every rule, mask, patch, empty row, dtype and shape.

Pages are poisoned with NaN wherever no row may look, as for the other kernels.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.attention.decode_lists import DecodeLists
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan, group_rows
from looseleaf.config import RopeConfig
from looseleaf.errors import InvalidOption, NativeUnavailable
from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.native import native_build
from looseleaf.ops.native.c_compiler import find_compiler
from looseleaf.ops.native.native_build import cache_folder, load_library
from looseleaf.ops.partial_attention import WorkList, partial_attention
from looseleaf.ops.partial_attention.native import partial_attention_native
from looseleaf.ops.rotate import rotate
from looseleaf.rope.frames import build_rotation
from looseleaf.types import AttnState, ScoreRule
from looseleaf_lab.testing.budget import assert_state_within_budget
from looseleaf_lab.testing.build import SceneBuilder
from looseleaf_lab.testing.lists import work_list
from looseleaf_lab.testing.oracle import dense_attention, plain_attention
from looseleaf_lab.testing.poison import poisoned
from looseleaf_lab.testing.scene import Scene, Shape, with_values
from looseleaf_lab.testing.variants import VARIANTS

EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
# few shapes, since each is compiled; what is no constant to the compiler varies freely
SHAPES = st.builds(
    Shape,
    num_qo_heads=st.just(4),
    num_kv_heads=st.sampled_from([1, 2]),
    head_dim=st.just(32),
    rotary_dim=st.sampled_from([None, 12]),
    soft_cap=st.sampled_from([0.0, 3.0]),
    window=st.sampled_from([0, 1, 25]),
    alibi=st.booleans(),
    masks=st.booleans(),
    patches=st.booleans(),
    per_head=st.booleans(),
    num_requests=st.integers(1, 5),
)


def decode_scene(seed: int, shape: Shape) -> Scene:
    return SceneBuilder(seed, shape).decode()


def partial_states(scene: Scene, work: WorkList) -> AttnState:
    with poisoned():
        return partial_attention(
            scene.q, scene.k_pages, scene.v_pages, work, scene.rotation, scene.rule,
            scene.slot_positions, "native",
        )  # fmt: skip


def attended(scene: Scene, work: WorkList) -> AttnState:
    return merge_states(partial_states(scene, work), work.row_state_indptr)


def assert_right(actual: AttnState, scene: Scene) -> None:
    dtype = scene.shape.dtype
    plain = plain_attention(scene)
    actual = with_values(scene, actual)
    assert_state_within_budget(actual, dense_attention(scene), plain, dtype)


@EVERY_VARIANT
def test_decode_attends_within_the_budget(variant: str) -> None:
    scene = decode_scene(11, VARIANTS[variant])
    for grouped, pages in [(True, None), (False, 1)]:
        assert_right(
            attended(scene, work_list(scene, grouped=grouped, pages_per_item=pages)), scene
        )


@settings(max_examples=30)
@given(shape=SHAPES, seed=st.integers(0, 2**16), pages=st.integers(1, 6), grouped=st.booleans())
def test_decode_is_dense_attention_under_random_rules(
    shape: Shape, seed: int, pages: int, grouped: bool
) -> None:
    scene = decode_scene(seed, shape)
    work = work_list(scene, grouped=grouped, pages_per_item=pages, seed=seed)
    assert_right(attended(scene, work), scene)


@HALF
@pytest.mark.parametrize("variant", ["gqa", "alibi", "everything"])
def test_half_precision_attends_within_the_budget(variant: str, dtype: torch.dtype) -> None:
    scene = decode_scene(13, replace(VARIANTS[variant], dtype=dtype))
    assert_right(attended(scene, work_list(scene)), scene)


def shared_states(sharing: int, dtype: torch.dtype, *, grouping: bool) -> AttnState:
    """States of some rows that read a document together, or each alone, from a seed."""
    # two heads a key head: six packed rows are read as they are, ten and eighty from widened keys
    generator = torch.Generator().manual_seed(sharing)
    rotation = build_rotation(RopeConfig(head_dim=64, rotary_dim=64), 512, torch.device("cpu"))
    document = tuple(range(7))
    q = torch.randn(sharing, 4, 64, generator=generator).to(dtype)
    pages = torch.randn(2, 7 + sharing, 2, 16, 64, generator=generator).to(dtype)
    rows = [
        DecodeRow(115 + n, (ReadSpan(document, n, 105, 7),), ReadSpan((7 + n,), 105 + n, 11, 0))
        for n in range(sharing)
    ]
    groups = group_rows(rows, grouping=grouping)
    assert len(groups.items) == (1 if grouping else sharing)
    work = DecodeLists(rows, groups, page_size=16, split_keys=256).work
    with poisoned():
        return partial_attention_native(q, *pages, work, rotation, ScoreRule(0.125))


SHARING = pytest.mark.parametrize("sharing", [3, 5, 40])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@SHARING
def test_who_reads_along_changes_no_bit(dtype: torch.dtype, sharing: int) -> None:
    together = shared_states(sharing, dtype, grouping=True)
    alone = shared_states(sharing, dtype, grouping=False)
    assert torch.equal(together.out, alone.out)
    assert torch.equal(together.lse, alone.lse)


@SHARING
def test_what_a_compiler_makes_of_them_changes_no_bit(
    sharing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two copies of one loop may round differently, and so may rows by who reads along."""
    usual = shared_states(sharing, torch.float32, grouping=True)
    compiler = tmp_path / "cc"
    compiler.write_text(
        f'#!/bin/sh\nexec {" ".join(find_compiler())} "$@" -O1 -fno-tree-vectorize\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.cache_clear()
    plainer = shared_states(sharing, torch.float32, grouping=True)
    load_library.cache_clear()
    assert list(cache_folder().iterdir())
    assert torch.equal(usual.out, plainer.out)
    assert torch.equal(usual.lse, plainer.lse)


def test_no_items_are_empty_states() -> None:
    scene = decode_scene(15, Shape())
    work = work_list(scene)
    nothing = replace(work, num_items=torch.zeros_like(work.num_items))
    state = partial_states(scene, nothing)
    assert state.lse.shape == (nothing.state_capacity, 4)
    assert (state.lse == -torch.inf).all()


def test_patches_without_slot_positions_are_refused() -> None:
    scene = decode_scene(17, VARIANTS["patches"])
    with pytest.raises(InvalidOption, match="slot_positions"):
        partial_attention(
            scene.q, scene.k_pages, scene.v_pages, work_list(scene), scene.rotation, scene.rule,
            implementation="native",
        )  # fmt: skip


def test_what_the_kernels_can_not_do_is_refused() -> None:
    scene = decode_scene(18, Shape())
    work = work_list(scene)
    with pytest.raises(InvalidOption, match="make them the same"):
        partial_attention(
            scene.q.half(), scene.k_pages, scene.v_pages, work, scene.rotation, scene.rule,
            implementation="native",
        )  # fmt: skip
    with pytest.raises(NativeUnavailable, match="float64"):
        partial_attention(
            scene.q.double(), scene.k_pages.double(), scene.v_pages.double(), work, scene.rotation,
            scene.rule, implementation="native",
        )  # fmt: skip
    with pytest.raises(InvalidOption, match="no C kernel"):
        rotate(scene.q, torch.arange(len(scene.q)), scene.rotation, implementation="native")


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(NativeUnavailable, match=r"install gcc or clang, .*cpu_kernels='torch'"):
        find_compiler()


def test_a_source_that_does_not_compile_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NativeUnavailable, match="can't compile"):
        load_library("int f(void) { return ANSWER }", (("ANSWER", 4),))
    assert not list(cache_folder().iterdir())


def test_what_does_not_compile_is_not_tried_again_at_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, tried = tmp_path / "cc", tmp_path / "tried"
    compiler.write_text(f"#!/bin/sh\necho once >> {tried}\necho 'no stdio.h' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(compiler))
    source, times = "int answer(void) { return ANSWER; }", []
    for _ in range(3):
        with pytest.raises(NativeUnavailable, match=r"no stdio\.h"):
            load_library(source, (("ANSWER", 43),))
        times.append(tried.read_text().count("once"))
    assert times[0] == times[-1]
    # a compiler that works is heard of at once
    monkeypatch.delenv("CC")
    assert load_library(source, (("ANSWER", 43),)).answer() == 43


def test_a_compiled_file_that_is_damaged_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def cut(compiler: object, way: object, flags: object, source: str, path: Path) -> None:
        path.write_bytes(b"half of it")

    monkeypatch.setattr(native_build, "compile_library", cut)
    with pytest.raises(NativeUnavailable, match=r"delete .*\.so if it is damaged"):
        load_library("int answer(void) { return ANSWER; }", (("ANSWER", 44),))


def test_a_kernel_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = "int answer(void) { return ANSWER; }"
    assert load_library(source, (("ANSWER", 41),)).answer() == 41
    assert load_library(source, (("ANSWER", 42),)).answer() == 42
    assert len(list(cache_folder().iterdir())) == 2
    load_library.cache_clear()
    native_build._try_to_load.cache_clear()
    # from here on a compiler would fail, and none is asked
    monkeypatch.setattr(native_build, "compile_library", None)
    assert load_library(source, (("ANSWER", 41),)).answer() == 41
