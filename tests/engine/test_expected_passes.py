"""What the loading controller expects a pass to read is what the pass reads."""

from dataclasses import replace
from typing import Any

import pytest

from looseleaf import Fuse
from looseleaf.engine.pace import ComputePace
from looseleaf.engine.pacing import LoadingController, pass_seconds
from tests.engine.harness import Folder, document, drawn, words
from tests.engine.tiered import forget_pool, tiered

PARAMS = drawn(3, max_tokens=1)
Pass = tuple[int, int, bool]


class Expecting(ComputePace):
    """Notes what is asked of it and what it is told: rows, pairs, whether it blends."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.told = list[Pass](), list[Pass]()

    def predict(self, rows: int, pairs: int, *, blends: bool = False) -> float | None:
        self.asked.append((rows, pairs, blends))
        return 1e-9

    def observe(self, rows: int, pairs: int, seconds: float, *, blends: bool = False) -> None:
        self.told.append((rows, pairs, blends))


@pytest.mark.parametrize("fuse", [None, *(Fuse("random", ratio=r) for r in (0.2, 0.6, 0.9, 1.0))])
def test_what_a_pass_is_expected_to_read_is_what_it_reads(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch, fuse: Fuse | None
) -> None:
    llm, before = tiered(checkpoint(), host_gib=0.01), list[Pass]()
    prompt = [words(1, 9), *(document(n, 30 + 20 * n) for n in range(3)), words(9, 12)]
    llm.generate([prompt], PARAMS)
    forget_pool(llm)
    expecting = Expecting()
    tiering, choose = llm.engine.tiering, LoadingController.choose
    assert tiering.controller is not None
    tiering.controller.pace = expecting
    recorder: Any = llm.engine.runner
    recorder.runner = replace(recorder.runner, pace=expecting)

    def chosen(self: LoadingController, sequence: Any, *others: Any) -> Any:
        told = choose(self, sequence, *others)
        # and before it is known which tokens these will be
        pass_seconds(fuse or Fuse("none"), sequence, expecting)
        before.append(expecting.asked[-1])
        return told

    monkeypatch.setattr(LoadingController, "choose", chosen)
    monkeypatch.setattr(LoadingController, "passes_over", lambda *_: False)
    (output,) = llm.generate([prompt], PARAMS, fuse=fuse)
    llm.close()
    assert output.reuse.loading is not None and len(before) == 1
    # text in front of the documents need not wait for them
    rows, pairs = (sum(told[n] for told in expecting.told) for n in (0, 1))
    blends = any(told[2] for told in expecting.told)
    expected = expecting.asked[-2]
    assert expected[0] == before[0][0] == rows
    assert expected[2] == before[0][2] == blends == (fuse is not None and fuse.ratio != 1.0)
    assert expected[1] == pytest.approx(pairs, rel=0.02)
    assert before[0][1] == pytest.approx(pairs, rel=0.08)
