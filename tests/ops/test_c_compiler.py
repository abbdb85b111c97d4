"""Compilers differ in what they know, and machines in where they let anything be written: kernels
are compiled all the same, with what is there.

What this machine lacks is played: by a compiler that refuses, by folders that can't be written to.
"""

import ctypes
import logging
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from looseleaf.errors import NativeUnavailable
from looseleaf.ops.native import c_compiler, native_build
from looseleaf.ops.native.c_compiler import best_options, find_compiler, vector_lanes
from looseleaf.ops.native.native_build import cache_folder, load_library, read_source

ANSWER = "int answer(void) { return ANSWER; }"
Compiler = Callable[[str], Path]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was compiled before, and what is said is said again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native_build.process_folder.cache_clear()
    best_options.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Makes $CC the usual compiler behind some lines of shell."""

    def make(lines: str) -> Path:
        path = tmp_path / "cc"
        path.write_text(f'#!/bin/sh\n{lines}\nexec {" ".join(find_compiler())} "$@"\n')
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))
        return path

    return make


def refusing(flag: str) -> str:
    return f'case " $* " in *" {flag} "*) echo "unsupported option {flag}" >&2; exit 1;; esac'


def answer(number: int) -> int:
    return int(load_library(ANSWER, (("ANSWER", number),)).answer())


@pytest.mark.parametrize("flag", ["-march=native", "-mcpu=native"])
def test_a_compiler_that_does_not_know_the_processor_does_without(
    flag: str, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    compiler(refusing(flag))
    assert answer(101) == 101
    assert "one thread" not in caplog.text


@pytest.mark.parametrize("flags", [["-fopenmp"], ["-fopenmp", "-fopenmp-simd"]])
def test_without_openmp_kernels_run_on_one_thread_and_it_is_said(
    flags: list[str], compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    path = compiler("\n".join(map(refusing, flags)))
    with caplog.at_level(logging.WARNING):
        assert answer(102 + len(flags)) == 102 + len(flags)
    assert f"use one thread: {path} has no OpenMP" in caplog.text


def test_a_runtime_of_openmp_that_is_not_installed_is_none(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    """clang takes the flag, and fails where it links."""
    compiler('case " $* " in *" -fopenmp "*" -o "*) echo "cannot find -lomp" >&2; exit 1;; esac')
    with caplog.at_level(logging.WARNING):
        assert answer(105) == 105
    assert "one thread" in caplog.text


def test_a_compiler_may_have_arguments_and_a_path_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = " ".join(find_compiler())
    folder = tmp_path / "with spaces"
    folder.mkdir()
    (folder / "cc").symlink_to(find_compiler()[0])
    monkeypatch.setenv("CC", str(folder / "cc"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "and a cache"))
    assert answer(106) == 106
    monkeypatch.setenv("CC", f"env {usual}")
    assert find_compiler()[1:] == tuple(usual.split())
    assert answer(107) == 107


@pytest.mark.parametrize("lines", ["printf 'fehler: \\374\\n' >&2; exit 1", "kill -9 $$"])
def test_what_a_compiler_says_may_be_in_any_encoding(lines: str, compiler: Compiler) -> None:
    compiler(lines)
    with pytest.raises(NativeUnavailable, match="can't compile the CPU kernels"):
        answer(108)


def test_a_compiler_of_another_machine_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cc"
    path.write_bytes(b"\x7fELF of another machine")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    with pytest.raises(NativeUnavailable, match=r"can't be run: .*name another compiler"):
        answer(109)


def test_a_cache_that_can_not_be_written_to_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert answer(110) == 110
    assert "set XDG_CACHE_HOME" in caplog.text


def test_what_a_cache_has_is_taken_out_of_it_where_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an image that was made with it, and is mounted read-only."""
    assert answer(111) == 111
    load_library.cache_clear()
    native_build._try_to_load.cache_clear()
    monkeypatch.setattr(native_build, "can_write_to", lambda folder: False)
    with caplog.at_level(logging.WARNING):
        assert answer(111) == 111
    assert not caplog.text


def test_who_has_no_home_has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    assert answer(112) == 112
    assert oct(cache_folder().parent.stat().st_mode & 0o777) == "0o700"


def test_a_machine_has_the_lanes_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated one sees what the processor of its host can do."""
    monkeypatch.setattr(c_compiler, "processor_features", lambda: "flags : avx2 avx512f")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert vector_lanes() == 16
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert vector_lanes() == 4


def test_apples_clang_is_told_of_the_openmp_of_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libomp.dylib").touch()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    told = next(way for way in c_compiler.option_candidates() if "-Xclang" in way.flags)
    assert told.flags == ("-Xclang", "-fopenmp", "-mcpu=native")
    assert told.libraries == (
        str(tmp_path / "lib" / "libomp.dylib"),
        f"-Wl,-rpath,{tmp_path / 'lib'}",
    )
    assert told.threads


HALVES = """
void widen_all(float *out) {
    for (int n = 0; n < 65536; n++) out[n] = widen_float16((float16_bits)n);
}
void widen_lanes(float *out) {
    for (int n = 0; n < 65536; n += LANES) {
        float16_lanes some;
        for (int l = 0; l < LANES; l++) some[l] = (float16_bits)(n + l);
        float_lanes wide = widen_float16_lanes(some);
        memcpy(out + n, &wide, sizeof wide);
    }
}
void round_all(const float *x, float16_bits *out, int64_t count) {
    for (int64_t n = 0; n < count; n++) out[n] = round_float16(x[n]);
}
"""


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("known", [{}, {"HAS_FLOAT16": 0}], ids=["type", "bits"])
def test_halves_are_widened_and_rounded_as_pytorch_does(lanes: int, known: dict[str, int]) -> None:
    source = read_source("looseleaf.ops") + HALVES
    library = load_library(source, tuple({"LANES": lanes, **known}.items()))
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    wide = every.float()
    for name in ("widen_all", "widen_lanes"):
        out = torch.empty(65536)
        getattr(library, name)(ctypes.c_void_p(out.data_ptr()))
        assert torch.equal(out.nan_to_num(1e9), wide.nan_to_num(1e9)), name
        assert torch.equal(out.isnan(), wide.isnan())
        assert torch.equal(out.signbit(), wide.signbit())
    # all halves, what lies half-way between two of them, and a little beside that
    finite = every[every.isfinite()].double().unique()
    between = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([finite, between, between * (1 + 1e-6), between * (1 - 1e-6)]).float()
    x = torch.cat([x, torch.tensor([0.0, -0.0, 65519.0, 65520.0, -1e9, 1e-9, torch.inf])])
    codes = torch.empty(len(x), dtype=torch.int16)
    library.round_all(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(codes.data_ptr()), ctypes.c_int64(len(x))
    )
    assert torch.equal(codes, x.half().view(torch.int16))
