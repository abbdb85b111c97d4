"""A process that ends while an engine is open ends as it would without one: threads that are in the
middle of something do not abort it."""

import subprocess
import sys

import pytest

BEGIN = """
import torch
from looseleaf_lab.bench.random_model import random_engine
from looseleaf.config import CacheConfig, EngineConfig, IndexConfig, TierConfig
from looseleaf.prompt.request import DocumentPart, Request, TextPart
from looseleaf.sampling_params import SamplingParams

one, other = torch.zeros(1 << 22), torch.ones(1 << 22)
begun = __import__("threading").Event()

def slowly(original):
    def called(*args, **named):
        begun.set()
        for _ in range(200):
            one.copy_(other)  # outside of the interpreter's lock
        return original(*args, **named)
    return called

tiers = TierConfig(host_gib=0.01, staging_gib=0.01)
cache = CacheConfig(num_pages=200)
config = EngineConfig(device="cpu", max_model_len=1000, cache=cache, tiers=tiers)
engine = random_engine("tiny", config, torch.device("cpu"))
document = DocumentPart(tuple(range(100)), 0, "document")
request = Request("one", (document, TextPart((1, 2))), SamplingParams(max_tokens=400))
"""
LOADING = """
from looseleaf.engine.tiering.compute_time import ComputeTime
from looseleaf.tiers.stores.host import HostReader

engine.tiering.controller.compute_time = ComputeTime()  # so documents are always loaded
engine.warm(request.parts)
while engine.has_work:
    engine.step()
engine.tiers.flush()
engine.tiering.release_pages()
engine.store.evict_idle()
HostReader.read = slowly(HostReader.read)
engine.add(request)
while not begun.is_set():
    engine._scheduler.schedule()
"""
STEPPING = """
from looseleaf.llm.engine_thread import Worker

engine.step = slowly(engine.step)
worker = Worker(engine)
worker.open(request, 0.0, lambda outcome: None)
begun.wait()
"""
INDEXING = """
from looseleaf.index import segment

segment.build_index = slowly(segment.build_index)
engine.hosting.add((document, TextPart(())), "", IndexConfig("flat", sink=1, local=1))
while not begun.is_set():
    engine.step()
"""


@pytest.mark.parametrize(
    ("work", "ending"),
    [(LOADING, "raise ValueError('the end')"), (STEPPING, ""), (INDEXING, "")],
    ids=["loading", "stepping", "indexing"],
)
def test_an_open_engine_does_not_abort_the_process(work: str, ending: str) -> None:
    script = BEGIN + work + ending + "\n"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "terminate" not in ran.stderr
    assert ran.returncode == (1 if ending else 0), ran.stderr
    assert ("the end" in ran.stderr) == bool(ending)
