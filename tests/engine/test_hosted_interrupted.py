"""Hosting that is interrupted, or deleted at its end, costs no answer and no work."""

from pathlib import Path
from typing import Any

import pytest
import torch

from looseleaf import LLM
from looseleaf.config import IndexConfig
from looseleaf.engine import hosting as module
from looseleaf.engine.hosted_pass import HostedPass, HostingJob
from looseleaf.engine.request import DocumentPart, TextPart
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
