"""Engines with tiers under observation, and tiers that fail, lie or are slow as they are told."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looseleaf import LLM
from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers import Reader, Record, Tier, TierFault, WrappedTier
from tests.engine.harness import document, drawn, make_llm, words

DOCUMENTS = [document(seed, 20 + 17 * seed) for seed in range(1, 5)]
PARAMS = drawn(3, max_tokens=4)


def prompts(count: int = 6) -> list[Any]:
    """Prompts over the same documents, in many orders."""
    return [
        [words(1, 9), *(DOCUMENTS[(n + k) % 4] for k in range(1 + n % 3)), words(50 + n, 6 + n)]
        for n in range(count)
    ]


def tiered(folder: Path, disk: Path | None = None, **options: Any) -> LLM:
    """An engine with a disk tier, which gives up after a short while."""
    chosen = {"disk_path": str(disk)} if disk else {}
    return make_llm(folder, **{"tier_timeout": 2.0, "staging_gib": 0.01, **chosen, **options})


def load_always(llm: LLM) -> None:
    """Take every document from a tier that has it, however small and quick to compute."""
    tiering = llm.engine.tiering
    assert tiering.controller is not None
    tiering.controller.compute_time.predict = lambda *_, **__: None  # type: ignore[method-assign]


def forget_pool(llm: LLM) -> None:
    """Bring all to the tiers, and leave nothing in the pool."""
    assert llm.engine.tiers is not None
    assert llm.engine.tiers.flush(30)
    llm.engine.tiering.release_pages()
    llm.engine.store.evict_idle()


def sources(output: Any) -> list[str]:
    return [d.source for d in output.reuse.documents]


def give_no_layer_ahead(llm: LLM) -> None:
    """Have tiers give no layer before the question of `prompts(1)` has attended to the one before
    it."""
    layers = llm.engine.runner.model.config.num_layers
    attended = [threading.Event() for _ in range(layers)]
    step = llm.engine.runner.attention.step

    def watched(rows: Any) -> Any:
        attend = step(rows)

        def call(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
            out = attend(layer, *qkv)
            if len(out) == len(prompts(1)[0][-1]):
                attended[layer].set()
            return out

        call.reads = attend.reads  # type: ignore[attr-defined]
        return call

    def mood(call: str, layer: int) -> None:
        if call == "read" and layer > 0:
            assert attended[layer - 1].wait(15)

    make_unruly(llm, mood)
    llm.engine.runner.attention.step = watched  # type: ignore[method-assign]


class Unruly(WrappedTier):
    """A tier that does as ``mood`` says before every call: of which method, and of which layer."""

    def __init__(self, tier: Tier, mood: Callable[[str, int], None]) -> None:
        super().__init__(tier)
        self.mood = mood

    def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        self.mood("contains", -1)
        return self.tier.contains(keys)

    def open(self, key: SegmentKey) -> "UnrulyReader | None":
        self.mood("open", -1)
        reader = self.tier.open(key)
        return None if reader is None else UnrulyReader(reader, self.mood)

    def put(self, record: Record, layers: Tensor) -> bool:
        self.mood("put", -1)
        return self.tier.put(record, layers)

    def delete(self, keys: Sequence[SegmentKey]) -> int:
        self.mood("delete", -1)
        return self.tier.delete(keys)

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        self.mood("pin", -1)
        self.tier.pin(key, pinned)


class UnrulyReader:
    def __init__(self, reader: Reader, mood: Callable[[str, int], None]) -> None:
        self.reader = reader
        self.mood = mood

    @property
    def record(self) -> Record:
        return self.reader.record

    def read(self, layer: int, into: Tensor) -> Tensor:
        self.mood("read", layer)
        return self.reader.read(layer, into)

    def close(self) -> None:
        self.reader.close()


def make_unruly(llm: LLM, mood: Callable[[str, int], None]) -> None:
    """Put every tier of an engine in that mood."""
    assert llm.engine.tiers is not None
    for guard in llm.engine.tiers.guards:
        guard.tier = Unruly(guard.tier, mood)


def raise_fault(kind: Any = "unavailable") -> None:
    raise TierFault(kind, "planted")
