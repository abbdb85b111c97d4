"""Steps over numbers at fixed addresses, as graphs replay them, on a device that has no graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from looseleaf import LLM, Document, Fuse, SamplingParams, Select
from looseleaf.blend.fusion import Fusion
from looseleaf.blend.scoring_graphs import ScoringGraphs
from looseleaf.config import Revise
from looseleaf.engine.runner.microbatches import logit_rows
from looseleaf.engine.runner.runner import Runner
from looseleaf.engine.scheduler import StepWork
from looseleaf.graphs import prefill as pass_graphs
from looseleaf.graphs.capture import Captures, Replayable, Within, stretches
from looseleaf.graphs.decode import MAX_ROWS, StepGraphs
from looseleaf.graphs.rows import RowBuffer
from looseleaf.llm.llm import make_config
from looseleaf.llm.load import load_engine
from looseleaf.prompt.request import Request
from tests.engine.harness import Folder, assert_idle, make_llm, words


class Eager(Captures):
    """Captures whose replays compute again, over the current contents of their tensors.

    Graphs that ``share`` their memory lose what they left when another one runs."""

    def __init__(self, *, share: bool) -> None:
        self.share = share
        self.results: list[Tensor] = []

    def capture(
        self,
        run: Callable[[Within], Tensor],
        starts: Sequence[int] = (),
        rewind: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, Sequence[Replayable]]:
        result = run(lambda attend: attend).clone()
        rewind()
        self.results.append(result)
        return result, [*(Again(self) for _ in starts), Again(self, run, result)]


@dataclass
class Again:
    """A graph: the last of a pass computes everything, those before it nothing."""

    captures: Eager
    run: Callable[[Within], Tensor] | None = None
    result: Tensor | None = None

    def replay(self) -> None:
        if self.run is None or self.result is None:
            return
        for other in self.captures.results if self.captures.share else ():
            other.fill_(torch.nan)
        self.result.copy_(self.run(lambda attend: attend))


class Steps(StepGraphs):
    """Graphs of steps on a device that has none."""

    def __post_init__(self) -> None:
        self._previous = torch.zeros(MAX_ROWS, dtype=torch.int64)
        self._captures = Eager(share=True)


class Passes(ScoringGraphs):
    """The same of passes that blend, and of steps that follow their documents."""

    def __post_init__(self) -> None:
        self._rows = RowBuffer(pass_graphs.MAX_ROWS, self.model.device)
        # a CPU copies no scores of a pass away from its result
        self._captures = Eager(share=False)


PROMPTS = [
    [words(1, 40), Document(words(2, 41), context="prompt"), words(3, 30)],
    [words(5, 90)],
]
POLICIES = {"select": Select("quest", tokens=80, dense_layers=(0,)), "revise": Revise(4)}
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)


def answers(folder: Folder, replayed: bool, **other: Any) -> tuple[list[Any], LLM]:
    llm = make_llm(folder())
    config = make_config({"dtype": "float32", "device": "cpu", "num_pages": 96})
    llm.engine = load_engine(folder(), config, implementation="reference")
    runner = llm.engine.runner
    if replayed:
        graphs = Steps(runner.model, runner.attention, 64)
        llm.engine.runner = replace(runner, graphs=graphs)
    outputs = llm.generate(PROMPTS, PARAMS, **{**POLICIES, **other})
    assert_idle(llm)
    return [o.outputs[0] for o in outputs], llm


def assert_alike(mine: list[Any], other: list[Any]) -> None:
    for one, two in zip(mine, other, strict=True):
        assert one.token_ids == two.token_ids
        for a, b in zip(one.logprobs, two.logprobs, strict=True):
            assert abs(a[0].logprob - b[0].logprob) < 1e-5


def test_steps_that_choose_and_revise_replay_with_the_same_answers(checkpoint: Folder) -> None:
    mine, llm = answers(checkpoint, True)
    assert_alike(mine, answers(checkpoint, False)[0])
    graphs = llm.engine.runner.graphs
    assert graphs is not None and graphs.replays == llm.engine.counters.steps


def test_the_list_of_a_gpu_chooses_and_revises_as_the_cpu_does(checkpoint: Folder) -> None:
    outputs = make_llm(checkpoint()).generate(PROMPTS, PARAMS, **POLICIES)
    assert_alike(answers(checkpoint, True)[0], [o.outputs[0] for o in outputs])


def test_budgets_of_layers_are_numbers_of_a_graph(checkpoint: Folder) -> None:
    """Every layer that is replayed has its own, and they change from step to step."""
    spread = Select("quest", ratio=0.4, dense_layers=(), layer_budgets=(6.0, 1.0, 2.0))
    outputs = make_llm(checkpoint()).generate(PROMPTS, PARAMS, select=spread, revise=Revise(4))
    mine, llm = answers(checkpoint, True, select=spread)
    assert_alike(mine, [o.outputs[0] for o in outputs])
    flat = answers(checkpoint, True, select=replace(spread, layer_budgets="flat"))[0]
    assert [o.logprobs for o in flat] != [o.logprobs for o in mine]
    graphs = llm.engine.runner.graphs
    assert graphs is not None and graphs.replays == llm.engine.counters.steps


BY_TENSORS = {
    "window": Select("window", tokens=80),
    "partial": Select("partial", tokens=80, dense_layers=(0,)),
    "sum": Select("quest", tokens=80, dense_layers=(0,), group="sum"),
    "mass": Select("quest", mass=0.7, dense_layers=(0,)),
    "shared": Select("quest", tokens=80, dense_layers=(), anchors=(0,)),
    "shared mass": Select("quest", mass=0.7, dense_layers=(), anchors=(0, 2)),
    "capped mass": Select("representatives", mass=0.9, tokens=96, dense_layers=()),
    "mass of sums": Select("partial", mass=0.6, ratio=0.8, group="sum"),
}


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("name", BY_TENSORS)
def test_policies_that_choose_by_tensors_replay_with_the_answers_of_the_cpu(
    checkpoint: Folder, name: str, window: int
) -> None:
    """And count what they read: with a mass only the device knows how many pages that is."""
    if window > 1 and (name == "window" or BY_TENSORS[name].anchors):
        pytest.skip("nothing is revised that was chosen by its place or by another layer")
    how = {"select": BY_TENSORS[name], "revise": Revise(window)}
    outputs = make_llm(checkpoint()).generate(PROMPTS, PARAMS, **how)
    mine, llm = answers(checkpoint, True, **how)
    assert_alike(mine, [o.outputs[0] for o in outputs])
    graphs = llm.engine.runner.graphs
    assert graphs is not None and graphs.replays == llm.engine.counters.steps
    dense = answers(checkpoint, False, select=None, revise=None)[0]
    assert [o.logprobs for o in dense] != [o.logprobs for o in mine]


@pytest.mark.parametrize("name", BY_TENSORS)
def test_pages_that_tensors_choose_are_counted_as_by_the_cpu(checkpoint: Folder, name: str) -> None:
    how = [{"select": BY_TENSORS[name]}, {}, {"select": BY_TENSORS[name]}]
    mine, _ = mixed(checkpoint, how, True)
    other, _ = mixed(checkpoint, how, False)
    llm = make_llm(checkpoint(), num_pages=192)
    assert_alike([o.outputs[0] for o in mine], [o.outputs[0] for o in other])
    engine_of_cpu, added = llm.engine, []
    for n, one in enumerate(how):
        parts = engine_of_cpu.prompts.from_parts(MIXED_PROMPTS[n])
        added.append(engine_of_cpu.add(Request(f"{n}", parts, PARAMS, **one)))
        engine_of_cpu.step()
    while engine_of_cpu.has_work:
        engine_of_cpu.step()
    for one, two, three in zip(mine, other, added, strict=True):
        assert one.select == two.select == three.output().select
    assert mine[0].select is not None and mine[0].select.chosen_steps
    assert mine[0].select.pages_read < mine[0].select.pages_held


BLENDED = [
    [Document(words(1, 40)), Document(words(2, 41)), Document(words(4, 33)), words(3, 30)],
    [words(5, 9), Document(words(2, 41)), words(6, 3), Document(words(1, 40)), words(7, 9)],
    [Document(words(4, 33)), words(8, 5)],
]


def blended(folder: Folder, passes: bool) -> tuple[list[Any], LLM]:
    llm = make_llm(folder())
    config = make_config({"dtype": "float32", "device": "cpu", "num_pages": 96})
    llm.engine = load_engine(folder(), config, implementation="reference")
    if passes:
        runner = llm.engine.runner
        again = Passes(runner.model, runner.attention)
        llm.engine.runner = replace(runner, passes=again)
    params, found = replace(PARAMS, max_tokens=3), []
    # the same prompts at once and alone, so that what a pass leaves behind meets the next one
    deviating = [Fuse("deviation", ratio=0.3, check_layers=some) for some in ((1,), (2,), (1, 2))]
    named = Fuse("random", ratio=0.3), Fuse("question", ratio=0.2), Fuse("links", ratio=0.3)
    for fuse in (*named, *deviating):
        found += llm.generate(BLENDED, params, fuse=fuse)
        found += llm.generate(BLENDED[1:2], params, fuse=fuse)
    assert_idle(llm)
    return [output.outputs[0] for output in found], llm


def test_passes_that_blend_replay_with_the_same_answers(checkpoint: Folder) -> None:
    mine, llm = blended(checkpoint, True)
    assert_alike(mine, blended(checkpoint, False)[0])
    passes = llm.engine.runner.passes
    # two passes of each policy, as many of evidence, and those of scouts
    assert passes is not None and passes.replays > 10


AT_RANDOM = Fuse("random", ratio=0.3)


def in_turn(folder: Folder, replayed: bool, fuse: Fuse = AT_RANDOM) -> tuple[list[Any], int]:
    """Answers to prompts that come one after another, each while those before it decode; and how
    many steps were computed as two."""
    llm, params, parts = make_llm(folder()), replace(PARAMS, max_tokens=9), 0
    config = make_config({"dtype": "float32", "device": "cpu", "num_pages": 192})
    llm.engine = load_engine(folder(), config, implementation="reference")
    if replayed:
        runner = llm.engine.runner
        graphs, passes = Steps(runner.model, runner.attention, 64), Passes(*about(runner))
        llm.engine.runner = replace(runner, graphs=graphs, passes=passes)
    asked, added = list[Any](), 0
    while len(asked) < 5 or llm.engine.has_work:
        if added % 2 == 0 and len(asked) < 5:
            prompt = llm.engine.prompts.from_parts(BLENDED[len(asked) % 2])
            request = Request(f"{len(asked)}", prompt, params, fuse=fuse)
            asked.append(llm.engine.add(request))
        before = llm.engine.runner.passes.replays if replayed else 0
        llm.engine.step()
        added += 1
        if replayed and llm.engine.runner.passes.replays > before:
            parts += bool(llm.engine.last_step.decode_rows)
    assert_idle(llm)
    return [progress.output().outputs[0] for progress in asked], parts


QUEST = Select("quest", tokens=80, dense_layers=(0,))
MIXED: list[dict[str, Any]] = [
    {"select": QUEST},
    {},
    # one graph, with other numbers
    {"select": replace(QUEST, tokens=64)},
    {"select": replace(QUEST, tokens=96)},
    {"select": QUEST, "revise": Revise(4)},
    {"select": Select("representatives", tokens=80, dense_layers=(0,))},
    {"select": QUEST, "revise": Revise(2)},
    {"select": QUEST},
]


# two of them begin alike, and read that together
MIXED_PROMPTS: list[Any] = [
    [words(n % 6, 90), Document(words(50, 41)), words(9, 8)] for n in range(8)
]


def mixed(folder: Folder, how: list[dict[str, Any]], replayed: bool) -> tuple[list[Any], Any]:
    """Answers of requests with policies of their own, each a step behind the one before."""
    llm = make_llm(folder())
    config = make_config({"dtype": "float32", "device": "cpu", "num_pages": 192})
    llm.engine = load_engine(folder(), config, implementation="reference")
    if replayed:
        runner = llm.engine.runner
        graphs, passes = Steps(runner.model, runner.attention, 64), Passes(*about(runner))
        llm.engine.runner = replace(runner, graphs=graphs, passes=passes)
    added = []
    for n, one in enumerate(how):
        parts = llm.engine.prompts.from_parts(MIXED_PROMPTS[n])
        added.append(llm.engine.add(Request(f"{n}", parts, PARAMS, **one)))
        llm.engine.step()
    while llm.engine.has_work:
        llm.engine.step()
    assert_idle(llm)
    return [progress.output() for progress in added], llm.engine


def test_rows_of_several_policies_replay_in_turn_with_the_same_answers(checkpoint: Folder) -> None:
    mine, engine = mixed(checkpoint, MIXED, True)
    other, _ = mixed(checkpoint, MIXED, False)
    assert_alike([o.outputs[0] for o in mine], [o.outputs[0] for o in other])
    for one, two in zip(mine, other, strict=True):
        assert one.revision == two.revision
        if one.revision is None:
            assert one.select == two.select
        else:
            # by list, pages that are taken over are counted whether or not they are chosen too
            counts = [(o.select.chosen_steps, o.select.pages_held) for o in (one, two)]
            assert counts[0] == counts[1]
    graphs = engine.runner.graphs
    # ever more policies, up to six
    assert graphs.replays > 3 * engine.counters.steps


def test_what_no_list_tells_is_not_computed_in_turn(checkpoint: Folder) -> None:
    """One launch of everything, since a part of it is launched kernel by kernel anyway."""
    how = [*MIXED[:5], {"select": replace(QUEST, recall_every=1)}]
    mine, engine = mixed(checkpoint, how, True)
    assert_alike(
        [o.outputs[0] for o in mine], [o.outputs[0] for o in mixed(checkpoint, how, False)[0]]
    )
    assert engine.runner.graphs.replays < engine.counters.steps


def about(runner: Runner) -> tuple[Any, Any]:
    return runner.model, runner.attention


def test_a_pass_beside_rows_that_decode_replays_and_so_do_they(checkpoint: Folder) -> None:
    mine, parts = in_turn(checkpoint, True)
    assert_alike(mine, in_turn(checkpoint, False)[0])
    assert parts > 0


def test_a_pass_that_computes_nothing_again_leaves_the_logits_of_rows_that_decode(
    checkpoint: Folder,
) -> None:
    """It replays as a step does, in the same memory."""
    nothing = Fuse("deviation", tokens=0)
    assert_alike(in_turn(checkpoint, True, nothing)[0], in_turn(checkpoint, False, nothing)[0])


class Units(Passes):
    """Passes on a device that reads span lists by their units."""

    has_units = True


def test_few_rows_behind_several_documents_are_a_pass_with_the_same_answers(
    checkpoint: Folder,
) -> None:
    found = []
    for kind in (Passes, Units):
        llm = make_llm(checkpoint())
        config = make_config({"dtype": "float32", "device": "cpu", "num_pages": 96})
        llm.engine = load_engine(checkpoint(), config, implementation="reference")
        runner = llm.engine.runner
        graphs, passes = Steps(runner.model, runner.attention, 64), kind(*about(runner))
        llm.engine.runner = replace(runner, graphs=graphs, passes=passes)
        found.append([o.outputs[0] for o in llm.generate(BLENDED[:1], PARAMS)])
        assert_idle(llm)
        assert passes.replays == (kind is Units)
    assert_alike(*found)


def test_logits_of_a_step_in_two_are_in_the_order_of_the_step() -> None:
    class Ends(NamedTuple):
        fusion: object
        ends_prompt: bool

    fused, text = object.__new__(Fusion), None
    chunks = [Ends(fused, True), Ends(text, True), Ends(text, False), Ends(fused, True)]
    work = object.__new__(StepWork)
    vars(work).update(decode=[object(), object()], chunks=chunks)
    # the parts: two that decode and the text, then both passes
    assert logit_rows(work) == [0, 1, 3, 2, 4]


def test_usual_steps_meet_graphs_that_warming_up_has_made(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint())
    config = make_config({"dtype": "float32", "device": "cpu", "num_pages": 192, "max_num_seqs": 8})
    llm.engine = load_engine(checkpoint(), config, implementation="reference")
    runner = llm.engine.runner
    graphs, passes = Steps(runner.model, runner.attention, 8), Passes(*about(runner))
    llm.engine.runner = replace(runner, graphs=graphs, passes=passes)
    told: list[tuple[str, int, int]] = []
    llm.engine.runner.warm_up(lambda *heard: told.append(heard))
    assert [done for _, done, _ in told] == list(range(told[0][2] + 1))
    assert_idle(llm)
    made, passed = graphs.num_captured, passes.num_captured
    assert made > 0 and passed == 5
    for prompts in (BLENDED[:1], BLENDED, [words(n, 9 + n) for n in range(8)]):
        llm.generate(prompts, PARAMS)
    llm.generate(BLENDED[1:], PARAMS, fuse=Fuse("random", ratio=0.3))
    assert graphs.num_captured == made and graphs.replays > 0


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 32, 80])
def test_graphs_of_a_pass_share_its_layers_and_are_short_at_both_ends(layers: int) -> None:
    starts = [*stretches(layers), layers]
    lengths = [b - a for a, b in pairwise(starts)]
    assert starts[0] == 0 and min(lengths) >= 1 and max(lengths) <= 8
    assert lengths[0] == lengths[-1] == 1
