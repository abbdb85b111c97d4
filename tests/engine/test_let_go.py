"""A document on its way from a tier that nobody wants any more, whatever has become of it."""

import pytest
import torch

from looseleaf.config import CacheConfig, EngineConfig, TierConfig
from looseleaf.engine.tiering.compute_time import ComputeTime
from looseleaf.prompt.request import DocumentPart, Request, TextPart
from looseleaf.sampling_params import SamplingParams
from looseleaf.tiers.stores.host import HostTier
from looseleaf_lab.bench.random_model import random_engine

DOCUMENT = DocumentPart(tuple(range(40)), 0, "document")


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "arrived"])
def test_a_load_that_ended_before_its_request_was_aborted_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    tiers = TierConfig(host_gib=0.01, staging_gib=0.01)
    config = EngineConfig("cpu", cache=CacheConfig(num_pages=64), tiers=tiers)
    engine = random_engine("tiny", config, torch.device("cpu"))
    assert engine.tiers is not None and engine.tiering.controller is not None
    # without a known compute time documents are always loaded
    engine.tiering.controller.compute_time = ComputeTime()
    engine.warm((DOCUMENT, TextPart((1,))))
    while engine.has_work:
        engine.step()
    assert engine.tiers.flush()
    engine.tiering.release_pages()
    engine.store.evict_idle()
    if fails:
        monkeypatch.setattr(HostTier, "open", lambda tier, key: None)
    engine.add(Request("aborted", (DOCUMENT, TextPart((1, 2))), SamplingParams(max_tokens=2)))
    engine._scheduler.schedule()
    (load,) = engine.tiering.arriving.values()
    load.wait_for_end(60.0)
    assert load.state == ("failed" if fails else "done")
    engine.abort("aborted")
    # the segment goes with the last who wanted it, or another needs its pages
    engine.store.evict_idle()
    other = engine.add(Request("other", (TextPart((1, 2, 3)),), SamplingParams(max_tokens=2)))
    while engine.has_work:
        engine.step()
    assert other.error is None and other.finished
    engine.check()
    engine.close()
