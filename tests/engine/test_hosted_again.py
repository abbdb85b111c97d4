"""A hosted document that the disk has with another index, or with none, or that is asked for again
after a failure."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from looseleaf import LLM, AsyncLLM
from looseleaf.config import IndexConfig, Select
from looseleaf.engine.documents import host_store as hosted_records
from looseleaf.engine.documents.host_prefill import HostedPass
from looseleaf.prompt.request import DocumentPart, Request, TextPart
from tests.engine.harness import GREEDY, Folder, document

LONG = document(0, 700, context="alone")
GRAPH = IndexConfig("graph", sink=4, local=12, degree=8, top=20)
IVF, AUTO = IndexConfig("ivf"), IndexConfig("auto")


def make(folder: Path, disk: Path) -> LLM:
    options: dict[str, Any] = {"num_pages": 64, "max_model_len": 1024, "dtype": "float32"}
    return LLM(folder, device="cpu", disk_path=str(disk), **options)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (IVF, GRAPH),
        (IVF, AUTO),
        (GRAPH, IndexConfig("graph", sink=4, local=12, degree=12, top=20)),
        (AUTO, IndexConfig("auto", recall=0.9)),
    ],
    ids=["ivf-graph", "ivf-auto", "degree", "recall"],
)
def test_another_index_that_learns_is_built_behind_a_restart(
    checkpoint: Folder, tmp_path: Path, first: IndexConfig, second: IndexConfig
) -> None:
    before = make(checkpoint("llama", "dynamic"), tmp_path)
    kept = before.host(LONG, index=first)
    before.close()
    again = make(checkpoint("llama", "dynamic"), tmp_path)
    hosted = again.host(LONG, index=second)
    assert hosted.index is not None and hosted.index.config == second
    assert torch.equal(hosted.kv, kept.kv)
    again.close()
    # it is the newer one that is found from now on
    third = make(checkpoint("llama", "dynamic"), tmp_path)
    third.host(LONG, index=second)
    assert (third.engine.hosting.loaded, third.engine.hosting.built) == (1, 0)
    third.close()


def test_another_index_that_learns_from_nothing_is_built_over_what_the_disk_has(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = make(checkpoint("llama", "dynamic"), tmp_path)
    kept = before.host(LONG, index=GRAPH)
    before.close()
    again = make(checkpoint("llama", "dynamic"), tmp_path)
    monkeypatch.setattr(HostedPass, "advance", None)
    hosted = again.host(LONG, index=IVF)
    assert hosted.index is not None and hosted.index.config == IVF
    assert torch.equal(hosted.kv, kept.kv)
    again.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed on Linux")
def test_a_hosted_document_whose_index_is_missing_leaves_no_file_open(
    checkpoint: Folder, tmp_path: Path
) -> None:
    first = make(checkpoint("llama", "dynamic"), tmp_path)
    first.host(LONG, index=IVF)
    first.close()
    for path in (tmp_path / "hosted").glob("*.sidecar"):
        path.unlink()
    again = make(checkpoint("llama", "dynamic"), tmp_path)
    again.host(LONG, index=IVF)
    files = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
    assert not [name for name in files if name.startswith(str(tmp_path)) and ".segment" in name]
    again.close()


def test_a_document_that_no_thread_could_index_fails_and_is_hosted_when_asked_for_again(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(checkpoint("llama", "dynamic"), tmp_path / "disk")
    hosting, start = llm.engine.hosting, threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "looseleaf-indexing":
            raise RuntimeError("can't start new thread")
        start(thread)

    parts = llm.engine.prompts.from_document(LONG)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        job = hosting.add(parts, "", IVF)
        while hosting.has_work:
            hosting.step()
    assert job.finished.is_set() and job.stage == "failed"
    assert "new thread" in str(job.error)
    again = hosting.add(parts, "", IVF)
    while hosting.has_work:
        hosting.step()
    assert again.finished.wait(60) and again.error is None
    assert hosting.find(again.segment.key) is again.segment


@pytest.mark.parametrize("found", [True, False], ids=["sound", "damaged"])
def test_requests_go_on_while_a_registered_document_is_read_from_disk(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    folder = checkpoint("llama", "dynamic")
    make(folder, tmp_path).host(LONG, index=IVF)
    answered, events, read = threading.Event(), list[str](), hosted_records._read

    def slowly(*about: Any) -> bool:
        answered.wait(20)
        events.append("read")
        return found and read(*about)

    monkeypatch.setattr(hosted_records, "_read", slowly)

    async def serve() -> tuple[int, int]:
        options: dict[str, Any] = {"num_pages": 64, "max_model_len": 1024, "dtype": "float32"}
        async with AsyncLLM(folder, device="cpu", disk_path=str(tmp_path), **options) as llm:

            async def register() -> str:
                states = [info.state async for info in llm.register(LONG, hosted=IVF)]
                return states[-1]

            async def ask() -> None:
                async for _ in llm.generate("Who is there?", GREEDY):
                    pass
                events.append("answered")
                answered.set()

            state, _ = await asyncio.gather(register(), ask())
            assert state == "ready"
            return llm.engine.hosting.loaded, llm.engine.hosting.built

    assert asyncio.run(serve()) == ((1, 0) if found else (0, 1))
    assert events == ["answered", "read"]


@pytest.mark.parametrize("found", [True, False], ids=["sound", "damaged"])
def test_what_is_deleted_while_it_is_read_from_disk_is_nowhere(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    folder = checkpoint("llama", "dynamic")
    make(folder, tmp_path).host(LONG, index=IVF)
    llm, go_on, read = make(folder, tmp_path), threading.Event(), hosted_records._read

    def slowly(*about: Any) -> bool:
        assert go_on.wait(20)
        return found and read(*about)

    monkeypatch.setattr(hosted_records, "_read", slowly)
    hosting, parts = llm.engine.hosting, llm.engine.prompts.from_document(LONG)
    job = hosting.add(parts, "", IVF, beside=True)
    assert job.stage == "loading" and not hosting.has_work
    hosting.forget(job.segment.key)
    go_on.set()
    hosting.indexing.close()
    assert job.stage != "ready" and job.finished.is_set() and not hosting.has_work
    assert hosting.find(job.segment.key) is None
    assert not list(tmp_path.rglob("*.segment"))


@pytest.mark.parametrize("kind", ["auto", "flat", "ivf", "graph"])
def test_a_document_of_ends_alone_is_found_on_disk_with_its_empty_index(
    checkpoint: Folder, tmp_path: Path, kind: Any
) -> None:
    short, index = document(0, 30, context="alone"), IndexConfig(kind)
    for built in (1, 0):
        llm = make(checkpoint("llama", "dynamic"), tmp_path)
        hosted = llm.host(short, index=index)
        assert hosted.index is not None and not len(hosted.index.indexed)
        assert llm.engine.hosting.built == built
        llm.close()


@pytest.mark.parametrize("kind", ["auto", "flat", "ivf", "graph"])
def test_a_document_of_no_tokens_is_hosted_and_nothing_is_read_of_it(
    checkpoint: Folder, tmp_path: Path, kind: Any
) -> None:
    llm = make(checkpoint("llama", "dynamic"), tmp_path)
    text = TextPart(tuple(range(3, 9)))
    parts = text, DocumentPart((), len(text.tokens), "none"), text
    job = llm.engine.hosting.add(parts, "", IndexConfig(kind))
    assert job.finished.wait(30)
    assert (job.stage, job.error) == ("ready", None)
    for asked in (parts, (*parts, DocumentPart((), len(text.tokens), "again"), text)):
        answers = []
        for select in (None, Select("retrieval", tokens=40)):
            progress = llm.engine.add(Request(f"{select}", asked, GREEDY, select=select))
            while llm.engine.has_work:
                llm.engine.step()
            answers.append(progress.output().outputs[0].token_ids)
        assert answers[0] == answers[1] and answers[0]
    llm.close()


def test_a_document_that_the_disk_has_no_room_for_is_told(
    checkpoint: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"num_pages": 64, "max_model_len": 1024, "disk_gib": 1e-5}
    llm = LLM(checkpoint("llama", "dynamic"), device="cpu", disk_path=str(tmp_path), **options)
    llm.host(LONG, index=IVF)
    (said,) = [record.getMessage() for record in caplog.records if "hosted" in record.getMessage()]
    assert "MiB is not kept on disk" in said and "disk_gib" in said
    llm.close()
