"""The GPU's kernels under `looseleaf conformance`, interpreted: right ones pass, and a broken one
fails the law that it breaks. The same on a card is in tests/gpu."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxtyping import config

from looseleaf.engine.runner.runner import Runner
from looseleaf_lab.conformance import Answers, LawVerdict, Subject, check_laws
from looseleaf_lab.conformance.operators import ORDERS, Stage, segments_at_offsets
from tests.checkpoints import make_checkpoint
from tests.lab.conformance.broken import BREAKS, break_kernel, kernel_source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("kernels") / "llama", "llama"))


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines that compute by kernels: one layer, four orders, and no checks of shapes."""
    monkeypatch.setattr(Stage, "layers", [1])
    monkeypatch.setattr("looseleaf_lab.conformance.operators.ORDERS", ORDERS[:4])
    create = Runner.create.__func__
    monkeypatch.setattr(
        Runner, "create", classmethod(lambda cls, *rest: create(cls, *rest[:3], "triton"))
    )
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def subject(folder: str) -> Subject:
    return Subject(folder, {"device": "cpu", "dtype": "float32"}, 160)


def law_1(folder: str) -> LawVerdict:
    (law,) = check_laws(Answers(subject(folder)), (1,))
    assert not law.reason, law.reason
    return law


def test_right_kernels_pass(folder: str) -> None:
    assert law_1(folder).status == "passed"
    assert all(finding.holds for finding in segments_at_offsets(subject(folder)))


@pytest.mark.parametrize(
    "what",
    [
        "a merge forgets how much each set weighs",
        "decoding is off by one in a frame",
    ],
)
def test_a_broken_decode_kernel_fails_law_1(
    folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    break_kernel(monkeypatch, tmp_path, what)
    assert law_1(folder).status == "failed"


def test_a_broken_prefill_kernel_fails_law_2(
    folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_kernel(monkeypatch, tmp_path, "a prompt is off by one in a frame")
    found = segments_at_offsets(subject(folder))
    # few new rows are read by the kernel that decodes
    assert [finding.holds for finding in found] == [True, False]


@pytest.mark.parametrize("what", BREAKS)
def test_what_is_broken_on_purpose_is_still_there(what: str) -> None:
    """Kernels that only a card runs change too."""
    operator, right, wrong = BREAKS[what]
    source = kernel_source(operator)
    assert source.count(right) == 1 and right != wrong
