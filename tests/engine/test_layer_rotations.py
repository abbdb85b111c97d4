"""Layers that turn by different tables: every read takes its own layer's.

Each test holds an engine to a dense definition that turns by the model's configuration, and a
second engine, of which two layers have each other's tables, must differ from it.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from looseleaf import LLM, Fuse, Select
from looseleaf.attention.paged import PagedAttention
from looseleaf.config import IndexConfig
from looseleaf.engine.runner import runner
from looseleaf.llm.llm import make_config
from looseleaf.llm.load import load_engine
from looseleaf.rope import layer_rotations, rope_frequencies
from looseleaf.sparse.evicting import Eviction
from looseleaf.sparse.evictors import H2O
from looseleaf.types import Rotation
from looseleaf_lab.testing.scene import turned_at
from tests.engine.fused import SEVERAL, blend
from tests.engine.harness import (
    TOLERANCE,
    Answer,
    Folder,
    Recorder,
    ask,
    document,
    drawn,
    make_llm,
    words,
    worst,
)
from tests.engine.oracle import blended_logits, dense_logits
from tests.retro.test_engine import PAGE_SIZE, answer, expected, quest

FAMILY = "smollm3"
EVERY_FAMILY = pytest.mark.parametrize("family", [FAMILY, "gemma3_text"])
PROMPT = [words(1, 11), document(1, 41), document(2, 17), words(2, 9)]
FELT = 100 * TOLERANCE


@pytest.fixture(params=[False, True], ids=["own tables", "two swapped"])
def swapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the first two layers of engines that are made have each other's tables."""
    if request.param:

        def exchanged(*args: Any) -> tuple[Rotation, ...]:
            first, second, *others = layer_rotations(*args)
            return second, first, *others

        monkeypatch.setattr(runner, "layer_rotations", exchanged)
    return bool(request.param)


def hold(error: float, swapped: bool) -> None:
    """What is right up to rounding is wrong by far with other tables."""
    assert error > FELT if swapped else error <= TOLERANCE


def errors(llm: LLM, one: Answer, prompt: Any) -> Tensor:
    """How far the logits behind each token are from those of the dense definition."""
    parts, output = llm.engine.prompts.from_parts(prompt), list(one.token_ids)
    dense = dense_logits(llm.engine.runner.model, parts, output)[-len(output) - 1 : -1]
    return (one.logits - dense).abs().amax(1)


def engine_by(folder: Any, implementation: Any, **options: Any) -> LLM:
    llm = make_llm(folder, **options)
    config = make_config({"dtype": "float32", "device": "cpu", "num_pages": 96})
    llm.engine = load_engine(folder, config, implementation=implementation)
    llm.engine.runner = Recorder(llm.engine.runner)  # type: ignore[assignment]
    return llm


@EVERY_FAMILY
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_prompts_and_tokens_behind_them_are_read_by_every_layers_own_table(
    checkpoint: Folder, family: str, kernels: str, swapped: bool
) -> None:
    llm = make_llm(checkpoint(family), cpu_kernels=kernels)
    (one,) = ask(llm, [PROMPT], drawn(3, 5))
    behind = errors(llm, one, PROMPT)
    # the first is of the prompt's pass, the others of passes of one row
    hold(float(behind[0]), swapped)
    hold(float(behind[1:].max()), swapped)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [(FAMILY, "reference"), ("gemma3_text", "reference"), (FAMILY, "triton")],
)
def test_operators_of_a_gpu_take_every_layers_own_table(
    checkpoint: Folder, family: str, implementation: Any, swapped: bool
) -> None:
    """Work lists and span lists; on a CPU Triton's interpreter is slow."""
    prompt = ["a", document(1, 9), document(2, 4), "?"]
    llm = engine_by(checkpoint(family), implementation)
    (one,) = ask(llm, [prompt], drawn(3, 3))
    hold(float(errors(llm, one, prompt).max()), swapped)


@EVERY_FAMILY
@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("selector", ["question", "links"])
def test_replaced_tokens_read_documents_by_every_layers_own_table(
    checkpoint: Folder, family: str, implementation: Any, selector: Any, swapped: bool
) -> None:
    llm = engine_by(checkpoint(family), implementation)
    one = blend(llm, SEVERAL, Fuse(selector, ratio=0.3))
    output = list(one.output.token_ids)
    dense = blended_logits(llm.engine.runner.model, one.parts, output, one.chosen)
    hold(worst(one.logits, dense[-len(output) - 1 : -1]), swapped)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_pages_are_chosen_by_every_layers_own_table(
    checkpoint: Folder, kernels: str, swapped: bool
) -> None:
    llm = make_llm(checkpoint(FAMILY), cpu_kernels=kernels)
    prompt = [words(1, 40), words(2, 71)]
    select = Select("quest", tokens=4 * PAGE_SIZE, dense_layers=())
    tokens, logits = answer(llm, prompt, 12, select=select)
    plainest = expected(llm, prompt, tokens, choose=quest(4 * PAGE_SIZE))
    hold(worst(logits, plainest), swapped)


@pytest.mark.parametrize("context", ["alone", "lead"])
@pytest.mark.parametrize("kind", ["flat", "graph"])
def test_hosted_documents_are_made_and_read_by_every_layers_own_table(
    checkpoint: Folder, kind: Any, context: Any, swapped: bool
) -> None:
    llm = make_llm(checkpoint(FAMILY), max_model_len=256)
    lead, book = words(1, 11), document(1, 120, context=context)
    prompt = [lead, book, words(2, 9)]
    parts, index = llm.engine.prompts.from_parts(prompt), IndexConfig(kind, sink=4, local=12)
    job = llm.engine.hosting.add(parts, "", index, None)
    while job.stage == "computing":
        llm.engine.step()
    assert job.finished.wait(60) and job.error is None
    params = drawn(3, 5)
    (output,) = llm.generate([prompt], params, select=Select("retrieval", ratio=1.0))
    assert output.reuse.documents[0].hosted
    recorder: Any = llm.engine.runner
    one = Answer(output, torch.stack(recorder.logits[output.request_id, 0]))
    behind = errors(llm, one, prompt)
    hold(float(behind[0]), swapped)
    hold(float(behind[1:].max()), swapped)


def test_keys_that_may_go_are_weighed_by_every_layers_own_table(
    checkpoint: Folder, swapped: bool
) -> None:
    llm = make_llm(checkpoint(FAMILY))
    attention: PagedAttention = llm.engine.runner.attention
    config = llm.engine.runner.model.config
    q = torch.randn(3, config.num_qo_heads, config.head_dim)
    k = torch.randn(config.num_kv_heads, 9, config.head_dim)
    at, ahead = torch.arange(30, 33), torch.tensor([2, 1, 0])
    eviction = Eviction(H2O(8), attention.rotations, attention.rules)
    apart = []
    for layer in range(2):
        rope = config.rope_of(layer)
        turned = turned_at(q, at, rope_frequencies(rope).inverse, rope.interleaved)
        scores = torch.einsum("rhgd,hnd->rhgn", turned.unflatten(1, (len(k), -1)), k)
        scores = scores * config.head_dim**-0.5
        hidden = torch.arange(9) >= 9 - ahead[:, None]
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
        apart.append(worst(eviction._weights(layer, q, k, at, ahead), weights))
    hold(min(apart), swapped)
    hold(max(apart), swapped)


def test_layers_of_one_law_share_a_table(checkpoint: Folder) -> None:
    attention = make_llm(checkpoint(FAMILY)).engine.runner.attention
    first, still, last = attention.rotations
    assert first is last and still is not first
    assert (still.cos == 1).all() and (still.sin == 0).all()
    one = make_llm(checkpoint("llama")).engine.runner.attention
    assert len({id(table) for table in one.rotations}) == 1
