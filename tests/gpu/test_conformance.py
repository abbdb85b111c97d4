"""The laws on a GPU, for every family: the same checks that `looseleaf conformance` does there."""

from pathlib import Path

import pytest

from looseleaf.conformance import Answers, Subject, check_laws
from looseleaf.engine.loading import reference_model
from tests.checkpoints import FAMILIES, make_checkpoint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_conforms(tmp_path: Path, family: str, dtype: str) -> None:
    folder = make_checkpoint(tmp_path, family)
    _conforms(str(folder), dtype, 200)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_model_conforms(dtype: str) -> None:
    _conforms(str(reference_model("block")), dtype, 512)


def _conforms(folder: str, dtype: str, tokens: int) -> None:
    subject = Subject(folder, {"device": "cuda", "dtype": dtype}, tokens)
    found = check_laws(Answers(subject))
    assert {law.number: (law.reason, law.worst) for law in found if law.status == "failed"} == {}
