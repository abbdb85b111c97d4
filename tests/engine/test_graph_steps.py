"""Steps over numbers at fixed addresses, as graphs replay them, on a device that has no graphs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from looseleaf import LLM, Document, SamplingParams, Select
from looseleaf.attention.device_choice import HostChoice
from looseleaf.config import Revise
from looseleaf.engine.graphs import MAX_ROWS, GraphKey, StepGraphs, _Graph, _lists
from looseleaf.engine.llm import make_config
from looseleaf.engine.loading import load_engine
from tests.engine.harness import Folder, assert_idle, make_llm, words


@dataclass
class Replay:
    """What a graph does when it is replayed: everything once more, over what stands there now."""

    steps: "Steps"
    key: GraphKey
    lists: Sequence[Any]
    logits: Tensor

    def replay(self) -> None:
        self.logits.copy_(self.steps._forward(self.key, self.lists, None))


class Steps(StepGraphs):
    """Graphs that compute anew."""

    def __post_init__(self) -> None:
        self._inputs = torch.zeros((4, MAX_ROWS), dtype=torch.int64)
        self._previous = torch.zeros(MAX_ROWS, dtype=torch.int64)

    def _capture(self, key: GraphKey, choices: Sequence[HostChoice | None]) -> _Graph:
        device = self.model.device
        lists = [_lists(*work, device) for work in zip(key.works, choices, strict=True)]
        self._inputs.zero_()
        self._inputs[1].fill_(-1)
        logits = self._forward(key, lists, None).clone()
        replay: Any = Replay(self, key, lists, logits)
        return _Graph(replay, lists, logits)


PROMPTS = [
    [words(1, 40), Document(words(2, 41), context="prompt"), words(3, 30)],
    [words(5, 90)],
]
POLICIES = {"select": Select("quest", tokens=80, dense_layers=(0,)), "revise": Revise(4)}
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)


def answers(folder: Folder, replayed: bool) -> tuple[list[Any], LLM]:
    llm = make_llm(folder())
    config = make_config({"dtype": "float32", "device": "cpu", "num_pages": 96})
    llm.engine = load_engine(folder(), config, implementation="reference")
    runner = llm.engine.runner
    if replayed:
        graphs = Steps(runner.model, runner.attention, 64)
        llm.engine.runner = replace(runner, graphs=graphs)
    outputs = llm.generate(PROMPTS, PARAMS, **POLICIES)
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
