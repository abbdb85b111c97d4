"""The laws on a GPU, for every family: the same checks that `looseleaf conformance` does there."""

from pathlib import Path

import pytest
import torch

from looseleaf.llm.load import reference_model
from looseleaf.rope import laws as rope_laws
from looseleaf_lab.conformance import Answers, Subject, check_laws
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.lab.conformance.broken import break_kernel


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


BROKEN = [
    ("float32", 1, "a merge forgets how much each set weighs"),
    ("float32", 1, "decoding is off by one in a frame"),
    ("float32", 1, "decoding sees one key less"),
    ("float32", 2, "a prompt is off by one in a frame"),
    ("bfloat16", 1, "a merge forgets how much each set weighs"),
    ("bfloat16", 2, "Hopper's kernel is off by one in a frame"),
]


@pytest.mark.parametrize(("dtype", "law", "what"), BROKEN)
def test_a_broken_kernel_fails_the_law_that_it_breaks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, law: int, what: str
) -> None:
    if "Hopper" in what and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no GPU of the Hopper generation")
    break_kernel(monkeypatch, tmp_path, what)
    subject = Subject(str(reference_model("block")), {"device": "cuda", "dtype": dtype}, 256)
    (found,) = check_laws(Answers(subject), (law,))
    assert (found.status, found.reason) == ("failed", "")


def test_rope_with_a_wrong_scaling_breaks_law_8(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(rope_laws._LAWS, "llama3", rope_laws._default)
    folder = str(make_checkpoint(tmp_path, "llama", "llama3"))
    subject = Subject(folder, {"device": "cuda", "dtype": "float32"}, 200)
    read, logits = check_laws(Answers(subject), (2, 8))
    assert read.status == "passed" and (logits.status, logits.reason) == ("failed", "")
