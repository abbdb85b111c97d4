"""``looseleaf ask --host``: documents longer than the pool, read by an index."""

from pathlib import Path

import pytest

from looseleaf import LLM, Document, SamplingParams
from looseleaf.config import Select
from looseleaf.engine.documents.hosting import Hosting
from tests.cli.conftest import Run

TEXT = "Mira Tolland signs the travel requests. " * 12
PAGES = 8


@pytest.fixture
def asked(model: Path, tmp_path: Path) -> tuple[object, ...]:
    """A question about a document that the pool has no room for."""
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    engine = ("--model", model, "--num-pages", PAGES, "--device", "cpu", "--max-tokens", 8)
    return ("ask", "Who signs?", "-d", path, "--system", "Be brief.", *engine)


def answer(model: Path, select: Select) -> str:
    """The library's answer about a hosted document."""
    llm = LLM(model, num_pages=PAGES, device="cpu")
    document = Document(TEXT)
    llm.host(document, system="Be brief.")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [document, "Who signs?"]},
    ]
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    return llm.chat(messages, greedy, select=select)[0].text


def test_a_hosted_document_may_be_longer_than_the_pool(
    run: Run, model: Path, asked: tuple[object, ...]
) -> None:
    assert "enlarge the cache" in run(*asked).sentence()
    result = run(*asked, "--host", "--show-reuse")
    assert result.code == 0
    assert result.out == answer(model, Select("retrieval")) + "\n"
    (document,) = (line for line in result.err.splitlines() if line.startswith("book.txt: "))
    assert document.endswith(", hosted")
    assert "select: retrieval, tokens 192" in result.err and "keys of hosted" in result.err


@pytest.mark.parametrize("policy", [(), ("--select", "retrieval")], ids=["", "named"])
def test_a_budget_says_how_many_keys_are_read(
    run: Run, model: Path, asked: tuple[object, ...], policy: tuple[str, ...]
) -> None:
    result = run(*asked, "--host", *policy, "--budget", "0.5", "--show-reuse")
    assert result.out == answer(model, Select("retrieval", ratio=0.5)) + "\n"
    assert "select: retrieval, ratio 0.5" in result.err


def test_what_a_disk_has_is_hosted_without_computing_it(
    run: Run, asked: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(*asked, "--host", "--disk-path", tmp_path / "tier")
    monkeypatch.setattr(Hosting, "_index", lambda self, job: pytest.fail("it was built again"))
    assert run(*asked, "--host", "--disk-path", tmp_path / "tier").out == first.out != ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "--select", "quest"), "--host is for --select retrieval"),
        (("--select", "retrieval"), "give --host too"),
        (("--host", "--context", "prompt"), "context='lead' or 'alone'"),
        (("--host", "--fuse", "first"), "--fuse can't be combined"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused_in_one_sentence(
    run: Run,
    asked: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(Hosting, "add", lambda *_: pytest.fail("it was hosted in vain"))
    assert message in run(*asked, *options).sentence()


def test_there_must_be_something_to_host(run: Run, model: Path) -> None:
    assert "name a document" in run("ask", "Who signs?", "--model", model, "--host").sentence()
