"""Reports on a terminal state loads and faults of tiers."""

from pathlib import Path

import pytest

from looseleaf import LLM, Document, SamplingParams
from looseleaf.cli.answering import tier_faults
from looseleaf.engine.tiering.load_controller import LoadingController
from looseleaf.tiers import DiskTier, TierFault
from tests.cli.conftest import Run

TEXT = "Mira Tolland signs the travel requests. " * 4
ONE = SamplingParams(max_tokens=1)


@pytest.fixture
def asked(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """A question about a document that a disk tier has, which is loaded however small it is."""
    monkeypatch.setattr(LoadingController, "passes_over", lambda *_: False)
    tier = tmp_path / "tier"
    llm = LLM(model, num_pages=64, device="cpu", disk_path=str(tier))
    llm.chat([{"role": "user", "content": [Document(TEXT), "Who?"]}], ONE)
    llm.close()
    (tmp_path / "note.txt").write_text(TEXT)
    engine = ("--model", model, "--num-pages", 64, "--device", "cpu", "--max-tokens", 2)
    about = ("-d", tmp_path / "note.txt", "--disk-path", tier, "--show-reuse")
    return ("ask", "Who signs?", *engine, *about)


def test_a_document_that_is_loaded_says_from_where_and_no_fault(
    run: Run, asked: tuple[object, ...]
) -> None:
    said = run(*asked).err
    assert "loaded from disk" in said and "tiers failed" not in said and "since" not in said


def test_a_damaged_document_is_told_with_its_tier(
    run: Run, asked: tuple[object, ...], tmp_path: Path
) -> None:
    (path,) = (tmp_path / "tier").glob("*.segment")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    lines = run(*asked).err.splitlines()
    (document,) = (line for line in lines if line.startswith("note.txt: "))
    assert document.endswith("computed, since the disk tier failed")
    assert "tiers failed: disk: 1 damaged" in lines


def test_a_tier_that_fails_when_it_is_asked_is_told(
    run: Run, asked: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def contains(*_: object) -> list[bool]:
        raise TierFault("unavailable", "planted")

    monkeypatch.setattr(DiskTier, "contains", contains)
    lines = run(*asked).err.splitlines()
    (document,) = (line for line in lines if line.startswith("note.txt: "))
    assert document.endswith("computed")
    assert "tiers failed: disk: 1 unavailable" in lines


def test_a_conversation_tells_the_faults_of_the_last_question(
    run: Run, asked: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([True])

    def contains(tier: DiskTier, keys: list[object]) -> list[bool]:
        if next(answers, False):
            raise TierFault("unavailable", "planted")
        return [False] * len(keys)

    monkeypatch.setattr(DiskTier, "contains", contains)
    note = next(str(each) for each in asked if str(each).endswith("note.txt"))
    script = f"Who signs?\n/reuse\n/add {note}\nWho else?\n/reuse\n/quit\n".encode()
    options = ("chat", *asked[2:-1])
    reports = run(*options, stdin=script).out.split("documents: ")[1:]
    assert [report.count("tiers failed: disk: 1 unavailable") for report in reports] == [1, 0]


def test_faults_are_counted_by_tier_and_kind(model: Path, tmp_path: Path) -> None:
    llm = LLM(model, num_pages=64, device="cpu", disk_path=str(tmp_path), host_gib=0.001)
    assert not tier_faults(llm)
    assert llm.engine.tiers is not None
    host, disk = llm.engine.tiers.guards
    before = tier_faults(llm)
    for _ in range(2):
        disk.fail(TierFault("damaged", "planted"))
    host.fail(TierFault("full", "planted"))
    host.counters.skipped += 3
    found = tier_faults(llm) - before
    assert found == {("disk", "damaged"): 2, ("host", "full"): 1, ("host", "skipped"): 3}
    llm.close()
