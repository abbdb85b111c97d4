"""APE: documents at one place, read apart from text, tempered and scaled."""

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from looseleaf import LLM, Fuse, SamplingParams
from looseleaf.config import Select
from looseleaf.errors import InvalidOption
from looseleaf.llm.llm import make_config
from looseleaf.llm.load import load_engine
from looseleaf.models import Decoder
from looseleaf.prompt.request import DocumentPart, Part, PromptParts, Request
from looseleaf.rope import rope_frequencies, softmax_scale
from looseleaf_lab.testing.scene import turned_at
from tests.checkpoints import ATTENTION_FAMILIES
from tests.engine.fused import LEAD, PARAMS, Blended, blend, blend_all, same
from tests.engine.harness import TOLERANCE, Folder, Recorder, document, make_llm, words, worst
from tests.models.dense_attend import scaled, sinks_of

CAPPED = "gemma2"
EVERY_FAMILY = pytest.mark.parametrize("family", [f for f in ATTENTION_FAMILIES if f != CAPPED])
APE = Fuse("ape", temperature=0.8, scale=0.7)
UNION = Fuse("ape", temperature=1.0, scale=1.0)
DOCUMENTS = [document(1, 23), document(3, 19), document(2, 5)]
PROMPT: list[Part] = [LEAD, *DOCUMENTS, words(2, 21)]


class _Dense:
    """An attention object over all tokens at once, by the definition; every document stands
    directly behind the lead, where it was encoded, so there is one frame for all."""

    def __init__(self, decoder: Decoder, parts: PromptParts, num_output: int, fuse: Fuse) -> None:
        self.config, self.fuse, self.sinks = decoder.config, fuse, sinks_of(decoder)
        lead, *documents, tail = parts
        lengths = [len(part.tokens) for part in documents]
        behind = len(lead.tokens) + max(lengths)
        spans = [range(len(lead.tokens))]
        spans += [range(len(lead.tokens), len(lead.tokens) + n) for n in lengths]
        spans += [range(behind, behind + len(tail.tokens) + num_output)]
        self.at = torch.tensor([place for span in spans for place in span])
        # 0 for text, and a number for each document
        numbers = [0, *range(1, len(documents) + 1), 0]
        self.of = torch.tensor([n for n, span in zip(numbers, spans, strict=True) for _ in span])
        self.is_tail = (self.of == 0) & (self.at >= behind)
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if k is None or v is None:
            k, v = self.layers[self.config.kv_layer(layer)]
        self.layers[layer] = k, v
        rope = self.config.rope_of(layer)
        rotation = rope_frequencies(rope).inverse, rope.interleaved
        group = self.config.num_qo_heads // self.config.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        q = scaled(q, self.at, self.config)
        scores = torch.einsum(
            "qhd,khd->hqk", turned_at(q, self.at, *rotation), turned_at(k, self.at, *rotation)
        )
        scores = scores * softmax_scale(self.config, layer)
        causal = self.at[:, None] >= self.at
        if window := self.config.window(layer):
            causal &= self.at[:, None] - self.at < window
        text = causal & (self.of == 0)
        own = causal & (self.of[:, None] == self.of) & (self.of > 0)
        other = causal & self.is_tail[:, None] & (self.of > 0)
        near = scores.masked_fill(~(text | own), -torch.inf)
        far = (scores / self.fuse.temperature).masked_fill(~other, -torch.inf)
        lses = [near.logsumexp(-1), far.logsumexp(-1) * self.fuse.scale]
        if (sinks := self.sinks[layer]) is not None:
            # a part with no value
            lses.append(sinks[:, None].expand_as(lses[0]))
        share = torch.stack(lses).softmax(0)[..., None]
        weights = share[0] * near.softmax(-1) + share[1] * far.softmax(-1).nan_to_num(0.0)
        return torch.einsum("hqk,khd->qhd", weights, v)


def assert_as_defined(llm: LLM, answer: Blended, fuse: Fuse) -> None:
    decoder, output = llm.engine.runner.model, list(answer.output.token_ids)
    tokens = [token for part in answer.parts for token in part.tokens] + output
    hidden = decoder.forward(torch.tensor(tokens), _Dense(decoder, answer.parts, len(output), fuse))
    expected = decoder.logits(hidden)[-len(output) - 1 : -1]
    assert worst(answer.logits, expected) <= TOLERANCE


@EVERY_FAMILY
@pytest.mark.parametrize("fuse", [APE, UNION], ids=str)
def test_an_answer_is_what_the_dense_definition_says(
    checkpoint: Folder, family: str, fuse: Fuse
) -> None:
    """In one chunk or many, on the CPU's own path."""
    for options in ({}, {"max_num_batched_tokens": 9, "max_num_seqs": 4}):
        llm = make_llm(checkpoint(family), **options)
        assert_as_defined(llm, blend(llm, PROMPT, fuse), fuse)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_every_implementation_reads_apart_alike(checkpoint: Folder, implementation: Any) -> None:
    prompt = PROMPT if implementation == "reference" else ["a", document(1, 4), document(2, 3), "?"]
    params = replace(PARAMS, max_tokens=2)
    llm = make_llm(checkpoint("llama"))
    expected = blend(llm, prompt, APE, params)
    config = make_config({"dtype": "float32", "device": "cpu", "num_pages": 96})
    llm.engine = load_engine(checkpoint("llama"), config, implementation=implementation)
    llm.engine.runner = Recorder(llm.engine.runner)  # type: ignore[assignment]
    same(blend(llm, prompt, APE, params), expected)


def test_the_order_of_the_documents_says_nothing(checkpoint: Folder) -> None:
    """They all stand at one place, behind the text before them."""
    llm = make_llm(checkpoint("llama"))
    expected = blend(llm, PROMPT, APE)
    assert len({d.offset for d in expected.output.reuse.documents}) == 1
    for order in permutations(DOCUMENTS):
        same(blend(llm, [LEAD, *order, PROMPT[-1]], APE), expected)


def test_temperature_and_scale_each_have_an_effect(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint("llama"))
    fuses = [
        UNION,
        Fuse("ape", temperature=0.8, scale=1.0),
        Fuse("ape", temperature=1.0, scale=0.7),
    ]
    logits = [blend(llm, PROMPT, fuse).logits[0] for fuse in [*fuses, APE]]
    for n, row in enumerate(logits):
        assert all(worst(row, other) > 10 * TOLERANCE for other in logits[:n])


def test_one_document_at_its_place_as_it_is_equals_plain_reuse(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint("llama"))
    prompt = [LEAD, DOCUMENTS[0], words(2, 21)]
    same(blend(llm, prompt, UNION), blend(llm, prompt, None))
    same(blend(llm, words(1, 30), APE), blend(llm, words(1, 30), None))


def test_empty_documents_leave_nothing_to_read_apart(checkpoint: Folder) -> None:
    """Alone and beside full ones; a request that has none else ends no other one's."""
    llm = make_llm(checkpoint("llama"))
    lead, *full, text = llm.engine.prompts.from_parts(PROMPT)
    empty = DocumentPart((), 0, "empty")
    prompts = {
        "empty": ((lead, empty, empty, text), APE),
        "mixed": ((lead, empty, *full, text), APE),
        "plain": ((lead, text), None),
        "full": ((lead, *full, text), APE),
    }
    progresses = [
        llm.engine.add(Request(name, parts, PARAMS, fuse=fuse))
        for name, (parts, fuse) in prompts.items()
    ]
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check()
    assert [progress.error for progress in progresses] == [None] * 4
    tokens = [list(progress.output().outputs[0].token_ids) for progress in progresses]
    assert tokens[0] == tokens[2]
    assert tokens[1] == tokens[3]


def test_batch_mates_and_history_change_nothing_and_no_text_is_taken_for_a_prefix(
    checkpoint: Folder,
) -> None:
    prompts = [(PROMPT, APE), (PROMPT, None), (PROMPT, Fuse("links", ratio=0.3)), (PROMPT, UNION)]
    alone = [blend(make_llm(checkpoint("qwen3")), *pair) for pair in prompts]
    llm = make_llm(checkpoint("qwen3"))
    for _ in range(2):
        for mine, expected in zip(blend_all(llm, prompts), alone, strict=True):
            same(mine, expected)


def test_a_request_that_makes_room_answers_the_same(checkpoint: Folder) -> None:
    long = replace(PARAMS, max_tokens=40)
    prompts = [([LEAD, document(1, 23), document(n, 19), words(n, 9)], APE) for n in (2, 3, 4)]
    alone = [blend(make_llm(checkpoint("llama")), *pair, long) for pair in prompts]
    llm = make_llm(checkpoint("llama"), num_pages=15)
    for mine, expected in zip(blend_all(llm, prompts, long), alone, strict=True):
        same(mine, expected)
    assert llm.engine.counters.preemptions > 0


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_documents_are_read_apart_whatever_kernels_decode(checkpoint: Folder, kernels: str) -> None:
    expected = blend(make_llm(checkpoint("llama")), PROMPT, APE)
    mine = blend(make_llm(checkpoint("llama"), cpu_kernels=kernels), PROMPT, APE)
    assert worst(mine.logits, expected.logits) < TOLERANCE


def test_the_report_names_the_policy_and_the_common_place(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint("llama"))
    reuse = blend(llm, PROMPT, APE).output.reuse
    assert reuse.fuse == APE and str(APE) == "ape, temperature 0.8, scale 0.7"
    assert reuse.document_tokens_recomputed == 0
    assert blend(llm, words(1, 30), APE).output.reuse.fuse is None


def test_what_has_no_meaning_is_refused_with_the_reason(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint("llama"))
    with pytest.raises(InvalidOption, match="no text can be between"):
        llm.generate([[LEAD, DOCUMENTS[0], "and", DOCUMENTS[1], "?"]], PARAMS, fuse=APE)
    parts = llm.engine.prompts.from_parts(PROMPT)
    with pytest.raises(InvalidOption, match="leave one of these options out"):
        llm.engine.add(Request("a", parts, SamplingParams(), fuse=APE, select=Select("quest")))
    assert not llm.engine.has_work


def test_a_model_that_caps_its_scores_is_not_tempered(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint(CAPPED))
    with pytest.raises(InvalidOption, match="which this model caps: use another selector"):
        llm.generate([PROMPT], PARAMS, fuse=APE)
