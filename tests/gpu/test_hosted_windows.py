"""Windows of rows that read hosted documents by their indexes, on a CUDA device: beside the CPU's
engine, and beside themselves where steps are disturbed."""

from itertools import count
from typing import Any

import pytest
import torch

from looseleaf import LLM, Document, SamplingParams, Select
from looseleaf.config import IndexConfig, Revise
from looseleaf.index.host.attend import HostedRead
from looseleaf.prompt.request import Request
from looseleaf.tiers import LoadFailed
from tests.engine.harness import words
from tests.gpu.test_select import assert_alike

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)
LENGTH = 30
INDEX = IndexConfig("flat", sink=4, local=12)
FEW = Select("retrieval", tokens=28)
DENSE_FIRST = Select("retrieval", tokens=28, dense_layers=(0,))
BOOK = Document(words(60, 240), context="alone")
OTHER = Document(words(61, 120), context="alone")
How = dict[str, Any]


def prompt(n: int) -> list[Any]:
    return [words(10 * n, 20 + 4 * n), *(BOOK, OTHER)[: 1 + n % 2], words(10 * n + 1, 24)]


def hosting(device: str = "cuda", **options: Any) -> LLM:
    llm = LLM(dtype="float32", device=device, **{"num_pages": 256, **options})
    for document in (BOOK, OTHER):
        llm.host(document, index=INDEX)
    return llm


def add(llm: LLM, hows: list[How], first: int = 0) -> list[Any]:
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, logprobs=1)
    return [
        llm.engine.add(Request(f"{n}", llm.engine.prompts.from_parts(prompt(n)), params, **how))
        for n, how in enumerate(hows, first)
    ]


def finish(llm: LLM, added: list[Any]) -> list[tuple[Any, list[float]]]:
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.check()
    found = [progress.output().outputs[0] for progress in added]
    return [(o.token_ids, [entry[0].logprob for entry in o.logprobs or ()]) for o in found]


def answers(llm: LLM, hows: list[How], alone: bool = False) -> list[tuple[Any, list[float]]]:
    if alone:
        return [finish(llm, add(llm, [how], n))[0] for n, how in enumerate(hows)]
    return finish(llm, add(llm, hows))


def revised(*windows: int) -> list[How]:
    return [{"select": FEW, "revise": Revise(window)} for window in windows]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("window", [2, 9])
def test_windows_on_the_gpu_are_those_of_the_cpu(window: int, graphs: bool) -> None:
    mine = answers(hosting(cuda_graphs=graphs), revised(window, window))
    assert_alike(mine, answers(hosting("cpu"), revised(window, window)))
    # else it would say nothing
    base = answers(hosting("cpu"), [{"select": FEW}] * 2)
    assert max(abs(a - b) for a, b in zip(mine[0][1], base[0][1], strict=True)) > 5e-3


def test_a_window_of_one_is_retrieval_to_the_bit() -> None:
    base, mine = (answers(hosting(), hows) for hows in ([{"select": FEW}] * 2, revised(1, 1)))
    assert base == mine


def test_a_full_budget_equals_dense_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(dtype="float32", device="cuda", num_pages=256)
    dense = answers(llm, [{}, {}])
    # rows whose newest reads everything would not be revised
    monkeypatch.setattr(HostedRead, "leaves_out", property(lambda read: True))
    everything = {"select": Select("retrieval", ratio=1.0), "revise": Revise(4)}
    assert_alike(answers(hosting(), [everything] * 2), dense)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_batch_of_mixed_windows_equals_one_at_a_time(graphs: bool) -> None:
    hows: list[How] = [
        *revised(4), {"select": FEW}, {"select": DENSE_FIRST, "revise": Revise(2)}, {},
        *revised(9),
    ]  # fmt: skip
    llm = hosting(cuda_graphs=graphs)
    assert_alike(answers(llm, hows), answers(llm, hows, alone=True))
    if graphs:
        held = llm.engine.runner.graphs
        assert held is not None and held.replays > LENGTH


def test_preemption_in_the_middle_of_a_window_changes_nothing() -> None:
    hows = [*revised(4, 9), {"select": FEW}]
    tight = hosting(num_pages=9)
    mine = answers(tight, hows)
    assert tight.engine.counters.preemptions > 0
    assert_alike(mine, answers(hosting(), hows))


@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_computed_in_vain_changes_nothing(graphs: bool) -> None:
    """A layer's keys may fail to arrive half way through a step, which is then made again."""
    calm = answers(hosting(cuda_graphs=graphs), revised(4, 2))
    llm = hosting(cuda_graphs=False)
    runner: Any = llm.engine.runner
    forward, steps = runner.model.forward, count()

    def failing(tokens: Any, attend: Any, *others: Any, **options: Any) -> Any:
        broken = next(steps) % 3 == 1

        def half_way(layer: int, *qkv: Any) -> Any:
            if broken and layer == 2:
                raise LoadFailed("lost")
            return attend(layer, *qkv)

        return forward(tokens, half_way, *others, **options)

    runner.model.forward = failing
    assert_alike(answers(llm, revised(4, 2)), calm)
    assert next(steps) > LENGTH


def test_who_reads_a_document_that_is_forgotten_goes_on() -> None:
    """And so does who is left when another is aborted in the middle of its window."""
    hows = revised(4, 9, 2)
    calm = answers(hosting(), hows)
    llm = hosting()
    added = add(llm, hows)
    for _ in range(LENGTH // 2):
        llm.engine.step()
    llm.engine.abort("1")
    for key in list(llm.engine.hosting._segments):
        assert llm.engine.hosting.forget(key)
    rest = finish(llm, added)
    assert_alike([rest[0], rest[2]], [calm[0], calm[2]])


def test_keys_are_counted_when_threads_have_read() -> None:
    llm = hosting()
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate([prompt(0)], params, select=FEW, revise=Revise(4))
    model = llm.engine.runner.model.config
    assert output.revision is not None
    rows, rest = divmod(output.revision.keys_read[0], model.num_layers * model.num_qo_heads * 28)
    # one step may have been run ahead
    assert rest == 0 and rows in (LENGTH - 1, LENGTH)
    ratios = output.revision.exposure
    assert len(ratios) == 4 and ratios[0] == 1.0 < ratios[1] < ratios[2] < ratios[3]
