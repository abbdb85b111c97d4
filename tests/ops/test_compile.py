"""Every kernel compiles for an H100, down to the binary, on a machine that has none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import looseleaf

H100_SHARED_BYTES = 227 * 1024
# as in pyproject.toml, whose filters a process of its own does not see
_OF_TRITON = (
    "ignore:AnnAssign.__init__ missing 1 required:DeprecationWarning:triton.compiler.code_generator"
)


def printed_by(name: str) -> list[str]:
    """The lines that a script beside this file prints, in which kernels are compiled."""
    script = Path(__file__).with_name(name)
    environment = os.environ | {"PYTHONPATH": str(Path(looseleaf.__file__).parents[1])}
    # neither interpreted, nor dependent on how the environment wants multiply-adds fused
    for variable in ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION"):
        environment.pop(variable, None)
    command = [sys.executable, "-W", "error", "-W", _OF_TRITON, str(script)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def test_kernels_compile_for_sm_90_and_fit_its_shared_memory() -> None:
    scripts = "compile_variants.py", "compile_latent.py"
    kernels = [json.loads(line) for script in scripts for line in printed_by(script)]
    # five shapes of 16 bits and three of 32, which have no products of few rows
    # packing for the three of bf16,
    # and two shapes whose pages are e4m3, with the five operators that see pages
    # and the fifteen kernels of that generation alone, two of them for groups of seven heads too,
    # and four products with codes of each of three kinds, and their rows in FP8
    # and two products and the values of each of five of GGUF's formats
    # and nine over latent keys and keys expanded from them
    # and routers of three laws, and experts by tiles of four sizes, with biases, with codes and
    # in MXFP4, by tensor cores and without
    assert len(kernels) == 5 * 23 + 3 * 20 + 3 * 3 + 2 * 5 + 15 + 2 + 14 + 15 + 9 + 61
    for kernel in kernels:
        assert kernel["binary_bytes"] > 0, kernel
        assert kernel["shared_bytes"] <= H100_SHARED_BYTES, kernel
        if kernel["shape"] == "hopper":
            # from 8 on it calls them itself, by registers: the compiler must keep off those
            assert kernel["barriers"] and max(kernel["barriers"]) < 8, kernel


def test_a_merge_reads_numbers_early_only_if_they_were_sent() -> None:
    assert printed_by("chained_merge.py") == ["early", "late"]
