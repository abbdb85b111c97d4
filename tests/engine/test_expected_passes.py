"""What the loading controller expects a pass to read is what the pass reads, and of a request that
all its rows are computed."""

from dataclasses import replace
from typing import Any

import pytest

from looseleaf import LLM, Fuse
from looseleaf.engine.tiering.compute_time import ComputeTime
from looseleaf.engine.tiering.load_controller import LoadingController, pass_seconds
from looseleaf.prompt.request import Request
from tests.engine.harness import Folder, document, drawn, words
from tests.engine.tiered import forget_pool, tiered

PARAMS = drawn(3, max_tokens=1)
Pass = tuple[int, int, bool]


class Expecting(ComputeTime):
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
    tiering.controller.compute_time = expecting
    recorder: Any = llm.engine.runner
    recorder.runner = replace(recorder.runner, compute_time=expecting)

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
    rows, pairs = (sum(told[n] for told in expecting.told) for n in (0, 1))
    blends = any(told[2] for told in expecting.told)
    # text in front of the documents does not wait for them
    ahead, behind = expecting.asked[-3:-1]
    assert ahead[0] == expecting.told[0][0] and ahead[1] == expecting.told[0][1]
    assert ahead[0] + behind[0] == before[0][0] == rows
    assert behind[2] == before[0][2] == blends == (fuse is not None and fuse.ratio != 1.0)
    assert ahead[1] + behind[1] == pytest.approx(pairs, rel=0.02)
    assert before[0][1] == pytest.approx(pairs, rel=0.08)


def test_rows_that_only_decode_tell_nothing_of_passes(checkpoint: Folder) -> None:
    """On a CPU they take another way, in a fraction of the time of as many new rows."""
    llm, expecting = tiered(checkpoint(), host_gib=0.01), Expecting()
    recorder: Any = llm.engine.runner
    recorder.runner = replace(recorder.runner, compute_time=expecting)
    (output,) = llm.generate([[words(1, 9), document(1, 30), "who?"]], drawn(3, max_tokens=6))
    llm.close()
    assert sum(rows for rows, _, _ in expecting.told) == len(output.prompt_token_ids)


def expected_first_token(llm: LLM, prompt: list[Any], **policies: Any) -> tuple[float | None, int]:
    """The seconds that are expected until a first token, and the rows that were computed for it,
    where loads take no time and each row a second."""
    expecting, tiering, tiers = Expecting(), llm.engine.tiering, llm.engine.tiers
    assert tiering.controller is not None and tiers is not None
    expecting.predict = lambda rows, pairs, **_: float(rows)  # type: ignore[method-assign]
    tiering.controller.compute_time = expecting
    tiers.predict = lambda tier, sizes: 0.0  # type: ignore[method-assign]
    recorder: Any = llm.engine.runner
    recorder.runner = replace(recorder.runner, compute_time=expecting)
    (output,) = llm.generate([prompt], PARAMS, **policies)
    assert output.reuse.loading is not None
    return output.reuse.loading.total_predicted, sum(rows for rows, _, _ in expecting.told)


LONG_LEAD, LOADED, NEW = words(7, 70), document(1, 30), document(2, 50)


@pytest.mark.parametrize("fuse", [None, Fuse("random", ratio=0.3)], ids=["plain", "fuse"])
@pytest.mark.parametrize("lead", [False, True], ids=["", "lead is there"])
@pytest.mark.parametrize("others", [[], [NEW]], ids=["all loaded", "one is new"])
def test_an_expected_first_token_has_all_that_the_request_computes(
    checkpoint: Folder, fuse: Fuse | None, lead: bool, others: list[Any]
) -> None:
    llm = tiered(checkpoint(), host_gib=0.01)
    llm.generate([[LONG_LEAD, LOADED, "who?"]], PARAMS)
    forget_pool(llm)
    if lead:
        llm.generate([[LONG_LEAD, "who?"]], PARAMS)
    prompt = [LONG_LEAD, *others, LOADED, words(9, 12)]
    expected, rows = expected_first_token(llm, prompt, fuse=fuse)
    llm.close()
    assert expected == rows


def test_no_first_token_is_expected_where_tokens_are_chosen_by_passes_of_their_own(
    checkpoint: Folder,
) -> None:
    llm = tiered(checkpoint(), host_gib=0.01)
    prompt = [LONG_LEAD, NEW, LOADED, words(9, 12)]
    llm.generate([prompt], PARAMS)
    forget_pool(llm)
    expected, _ = expected_first_token(llm, prompt, fuse=Fuse("question", ratio=0.3))
    llm.close()
    assert expected is None


def test_no_first_token_is_expected_behind_what_another_request_computes(
    checkpoint: Folder,
) -> None:
    llm = tiered(checkpoint(), host_gib=0.01, max_num_batched_tokens=16, max_num_seqs=4)
    llm.generate([[LONG_LEAD, LOADED, "who?"]], PARAMS)
    forget_pool(llm)
    parts = llm.engine.prompts.from_parts([LONG_LEAD, NEW, "what?"])
    llm.engine.add(Request("other", parts, PARAMS))
    llm.engine.step()
    expected, _ = expected_first_token(llm, [LONG_LEAD, NEW, LOADED, "who?"])
    llm.close()
    assert expected is None
