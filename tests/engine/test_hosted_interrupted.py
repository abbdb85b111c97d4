"""Hosting that is interrupted, or deleted at its end, costs no answer and no work."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from looseleaf import LLM
from looseleaf.config import IndexConfig, IndexKind
from looseleaf.engine.documents import host_prefill as hosted_pass
from looseleaf.engine.documents import hosting as module
from looseleaf.engine.documents.host_prefill import HostedPass, HostingJob
from looseleaf.errors import InvalidRequest
from looseleaf.index.host.segment import HostedSegment
from looseleaf.prompt.request import DocumentPart, TextPart
from tests.engine.harness import Folder, document

LONG = document(0, 200)
IVF = IndexConfig("ivf", sink=4, local=12)


def make(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", dtype="float32", num_pages=64, max_model_len=1024, **options)


def host_behind_a_text(llm: LLM) -> torch.Tensor:
    parts = (TextPart((3, 4, 5, 6)), DocumentPart(tuple(range(2, 90)), 4, "it"), TextPart(()))
    job = llm.engine.hosting.add(parts, "", IVF)
    while llm.engine.has_work:
        llm.engine.step()
    assert job.finished.wait(60) and job.error is None
    return job.segment.kv


def test_a_document_whose_beginning_was_interrupted_is_computed_as_any_other(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = host_behind_a_text(make(checkpoint("llama", "dynamic")))
    attend, seen = HostedPass.__call__, list[int]()

    def interrupted(self: HostedPass, layer: int, *states: Any) -> torch.Tensor:
        out = attend(self, layer, *states)
        seen.append(layer)
        if len(seen) == 1:
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(HostedPass, "__call__", interrupted)
    llm = make(checkpoint("llama", "dynamic"))
    with pytest.raises(KeyboardInterrupt):
        host_behind_a_text(llm)
    assert torch.equal(host_behind_a_text(llm), expected)


def test_a_document_interrupted_behind_its_last_chunk_is_not_computed_further(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(checkpoint("llama", "dynamic"))

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "computing" and done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.host(LONG, index=IVF, on_progress=interrupt)
    monkeypatch.setattr(HostedPass, "advance", None)
    assert llm.host(LONG, index=IVF).index is not None


def test_hosting_that_was_deleted_at_its_end_leaves_the_next_ones_parts(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(checkpoint("llama", "dynamic"), disk_path=str(tmp_path))
    hosting, store, parts = llm.engine.hosting, module.store, list[Path]()

    def deleted(tier: Any, job: HostingJob) -> None:
        store(tier, job)
        if not parts:
            hosting.forget(job.segment.key)
            prompt = llm.engine.prompts.from_document(LONG)
            hosting.add(prompt, "", IVF)
            assert hosting.folder is not None
            folder = hosting.folder / job.segment.key.hex()
            folder.mkdir(parents=True, exist_ok=True)
            # as the build that follows writes it
            parts.append(folder / "part.npz")
            parts[0].touch()

    monkeypatch.setattr(module, "store", deleted)
    job = hosting.add(llm.engine.prompts.from_document(LONG), "", IVF)
    while job.stage == "computing":
        llm.engine.step()
    for thread in hosting.indexing.threads:
        thread.join(60)
    assert parts and parts[0].exists()
    llm.close()


Place = tuple[str, int]


def places_in_hosting(act: Callable[[], object], stop_at: Place | None = None) -> list[Place]:
    """The lines of what hosts documents that ``act`` runs; interrupted before one of them."""
    files, seen = {module.__file__, hosted_pass.__file__}, dict[Place, None]()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            if place == stop_at and place not in seen:
                seen[place] = None
                raise KeyboardInterrupt
            seen[place] = None
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return [*seen]


@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_wherever_hosting_is_interrupted_it_goes_on_when_it_is_asked_for_again(
    checkpoint: Folder, kind: IndexKind
) -> None:
    llm, index = make(checkpoint("llama", "dynamic")), IndexConfig(kind, sink=4, local=12)
    text = document(1, 20)
    for keys_are_there in (False, True):

        def forget() -> None:
            for key in [*llm.engine.hosting._segments]:
                llm.engine.hosting.forget(key)
            if keys_are_there:  # noqa: B023
                llm.host(text, index=IndexConfig("flat", sink=2, local=4))

        def host() -> HostedSegment:
            return llm.host(text, index=index)

        forget()
        for place in places_in_hosting(host):
            forget()
            with pytest.raises(KeyboardInterrupt):
                places_in_hosting(host, place)
            segment = host()
            assert segment.index is not None and segment.index.config == index, place
    assert not llm.engine.hosting._jobs


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_a_document_whose_pass_could_not_be_made_is_not_on_its_way(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    llm = make(checkpoint("llama", "dynamic"))

    def fail(*_: object) -> None:
        raise error("no memory for the queries that are kept")

    with monkeypatch.context() as patch:
        patch.setattr(HostedPass, "__init__", fail)
        with pytest.raises(error):
            llm.host(LONG, index=IVF)
    assert not llm.engine.has_work
    assert llm.host(LONG, index=IVF).index is not None


def test_an_interrupted_document_may_be_hosted_with_another_index(checkpoint: Folder) -> None:
    llm, heard = make(checkpoint("llama", "dynamic")), list[str]()

    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    def listen(stage: str, done: int, total: int) -> None:
        heard.append(stage)

    with pytest.raises(KeyboardInterrupt):
        llm.host(LONG, index=IVF, on_progress=interrupt)
    other = IndexConfig("flat", sink=4, local=12)
    assert llm.host(LONG, index=other, on_progress=listen).index.config == other
    assert "computing" in heard
    with pytest.raises(KeyboardInterrupt):
        llm.host(LONG, index=IndexConfig("graph", sink=4, local=12), on_progress=interrupt)
    # what was there is there still
    again = llm.host(LONG, index=other, on_progress=listen)
    assert again.index is not None and again.index.config == other


def test_who_goes_on_with_an_interrupted_document_hears_of_it(checkpoint: Folder) -> None:
    llm, heard = make(checkpoint("llama", "dynamic")), list[int]()

    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.host(LONG, index=IVF, on_progress=interrupt)
    assert llm.engine.has_work
    llm.host(LONG, index=IVF, on_progress=lambda stage, done, total: heard.append(done))
    assert heard


def test_a_document_that_somebody_waits_for_keeps_its_index(checkpoint: Folder) -> None:
    llm = make(checkpoint("llama", "dynamic"))
    parts = llm.engine.prompts.from_document(LONG)
    llm.engine.documents.register(LONG, parts, "it", hosted=IVF)

    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    (job,) = llm.engine.hosting._jobs.values()
    job.on_progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.host(LONG, index=IVF)
    with pytest.raises(InvalidRequest, match="wait until that is there"):
        llm.host(LONG, index=IndexConfig("flat"))
