"""The identity of the figures in a file of answers: committed code, a model and its options."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looseleaf.errors import InvalidOption
from looseleaf_lab.cli.evals.shared import model_label


def require_committed(answers: Path | None, origin: Mapping[str, str]) -> None:
    """Raise InvalidOption if answers are stored, and code has changes that no commit has."""
    if answers and origin["commit"].endswith("-dirty"):
        raise InvalidOption("--answers needs committed code, to identify its answers: commit")


def source_of(
    origin: Mapping[str, str], model: str | None, engine: Mapping[str, Any]
) -> tuple[str, ...]:
    """The commit, the model's name, and its weights with the ``engine`` options."""
    from looseleaf.llm.load import find_model
    from looseleaf.models import model_fingerprint

    weights = model_fingerprint(find_model(model)).hex()
    name = model_label(model) if model else "reference"
    return origin["commit"], name, weights + repr(sorted(engine.items()))
