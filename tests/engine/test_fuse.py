"""Blended requests: what they answer, choose, share and give back. Laws 4 and 6: test_law_blend."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from looseleaf import Fuse
from looseleaf.blend import Candidates, Deviation
from looseleaf.blend.fusion import make_selector
from looseleaf.blend.token_scoring import TokenScoring
from looseleaf.engine.sequence import Phase
from looseleaf.errors import InvalidOption
from looseleaf.llm.llm import make_config
from looseleaf.llm.load import load_engine
from looseleaf.prompt.request import Request
from tests.blend.dense import DenseBlend, Pass, Prompt
from tests.blend.test_blending import filtered
from tests.checkpoints import ATTENTION_FAMILIES
from tests.engine.fused import (
    LEAD,
    PARAMS,
    SEVERAL,
    blend,
    blend_all,
    read_as_text,
    same,
)
from tests.engine.harness import (
    TOLERANCE,
    Folder,
    Recorder,
    assert_idle,
    document,
    make_llm,
    words,
    worst,
)
from tests.engine.oracle import blended_logits

SOME = Fuse("random", ratio=0.4)
POLICIES = [
    Fuse("all"),
    Fuse("first", tokens=3),
    SOME,
    Fuse("question", ratio=0.3),
    Fuse("deviation", ratio=0.3, check_layers=(1, 2)),
    Fuse("links", ratio=0.3),
]
EVERY_FAMILY = pytest.mark.parametrize("family", ATTENTION_FAMILIES)
EVERY_POLICY = pytest.mark.parametrize("fuse", POLICIES, ids=str)


@EVERY_FAMILY
@pytest.mark.parametrize("fuse", [p for p in POLICIES if p.selector != "deviation"], ids=str)
def test_a_blended_answer_is_what_the_dense_definition_says(
    checkpoint: Folder, family: str, fuse: Fuse
) -> None:
    """In one chunk or many, in pages of any size, in C or not, bit for bit repeatable or not."""
    some: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 4}]
    more = [{"page_size": 32, "cpu_kernels": "torch"}, {"batch_invariant": True}]
    for options in some + (more if family == "llama" else []):
        llm = make_llm(checkpoint(family), max_model_len=220, **options)
        answer = blend(llm, SEVERAL, fuse)
        assert answer.chosen and sum(answer.recomputed) == len(answer.chosen)
        output = list(answer.output.token_ids)
        expected = blended_logits(llm.engine.runner.model, answer.parts, output, answer.chosen)
        assert worst(answer.logits, expected[-len(output) - 1 : -1]) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "implementation"),
    [*((family, "reference") for family in ("qwen3", "mistral", "smollm3")), ("smollm3", "triton")],
)
def test_every_implementation_of_attention_blends_alike(
    checkpoint: Folder, family: str, implementation: Any
) -> None:
    """Work lists and span lists as a GPU has them; on a CPU Triton's interpreter is slow."""
    prompt, params, fuse = SEVERAL, replace(PARAMS, max_tokens=3), POLICIES[-1]
    if implementation == "triton":
        prompt, params = ["a", document(1, 4), document(2, 4), "?"], replace(params, max_tokens=2)
        fuse = SOME
    asked = [(prompt, SOME), (prompt, None), (prompt, fuse)]
    expected = blend_all(make_llm(checkpoint(family)), asked, params)
    llm = make_llm(checkpoint(family))
    options = {"dtype": "float32", "device": "cpu", "num_pages": 96}
    engine = load_engine(checkpoint(family), make_config(options), implementation=implementation)
    engine.runner = Recorder(engine.runner)  # type: ignore[assignment]
    llm.engine = engine
    for mine, other in zip(blend_all(llm, asked, params), expected, strict=True):
        same(mine, other)


@pytest.mark.parametrize("law", ["yarn", "llama3", "linear"])
def test_a_blended_answer_follows_every_rotation(checkpoint: Folder, law: str) -> None:
    llm = make_llm(checkpoint("llama", law))
    full = blend(llm, read_as_text(SEVERAL), None)
    same(replace(blend(llm, SEVERAL, Fuse("all")), chosen=[]), full)


@EVERY_POLICY
def test_documents_found_awaited_or_computed_give_the_same_answer(
    checkpoint: Folder, fuse: Fuse
) -> None:
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    llm = make_llm(checkpoint("llama"), **options)
    one, two = blend_all(llm, [(SEVERAL, fuse), (SEVERAL, fuse)])
    three = blend(llm, SEVERAL, fuse)
    sources = [[d.source for d in a.output.reuse.documents] for a in (one, two, three)]
    assert sources[0].count("computed") == 3 and "awaited" in sources[1]
    assert set(sources[2]) == {"cached"}
    same(two, one)
    same(three, one)


def test_one_document_at_two_places_has_two_patches(checkpoint: Folder) -> None:
    twice = blend(make_llm(checkpoint("llama")), [LEAD, *[document(1, 23)] * 3, "?"], SOME)
    offsets = [d.offset for d in twice.output.reuse.documents]
    lengths = {d.num_tokens for d in twice.output.reuse.documents}
    places = [
        {p - start for p in twice.chosen if 0 <= p - start < min(lengths)} for start in offsets
    ]
    assert len(lengths) == 1 and places[0] == set()
    assert places[1] and places[2] and places[1] != places[2]


@EVERY_POLICY
def test_blended_and_plain_requests_on_the_same_documents_do_not_disturb_each_other(
    checkpoint: Folder, fuse: Fuse
) -> None:
    """Law 3: decoded together, grouped or not, each answers as it does alone."""
    asked = [(SEVERAL, fuse), (SEVERAL, None), ([*SEVERAL[:-1], words(6, 12)], fuse)]
    asked += [([LEAD, *reversed(SEVERAL[1:3]), words(5, 5)], SOME)]
    alone = [blend(make_llm(checkpoint("llama")), *one) for one in asked]
    for grouping in (True, False):
        llm = make_llm(checkpoint("llama"), grouping=grouping)
        for mine, expected in zip(blend_all(llm, asked), alone, strict=True):
            same(mine, expected)
        assert (llm.engine.counters.grouped_rows > 0) == grouping


@EVERY_POLICY
def test_a_blended_request_that_makes_room_answers_the_same(checkpoint: Folder, fuse: Fuse) -> None:
    long = replace(PARAMS, max_tokens=40)
    asked = [([LEAD, document(1, 23), document(n, 19), words(n, 9)], fuse) for n in (2, 3, 4)]
    alone = [blend(make_llm(checkpoint("llama")), *one, long) for one in asked]
    llm = make_llm(checkpoint("llama"), num_pages=22)
    for mine, expected in zip(blend_all(llm, asked, long), alone, strict=True):
        same(mine, expected)
    assert llm.engine.counters.preemptions > 0


@pytest.mark.parametrize("fuse", [SOME, POLICIES[-1]], ids=str)
def test_a_blended_request_that_is_aborted_at_any_step_leaves_nothing(
    checkpoint: Folder, fuse: Fuse
) -> None:
    llm = make_llm(checkpoint("llama"), max_num_batched_tokens=12, max_num_seqs=4)
    parts = llm.engine.prompts.from_parts(SEVERAL)
    for steps in range(14):
        llm.engine.store.evict_idle()
        llm.engine.add(Request(f"r{steps}", parts, replace(PARAMS, n=2), fuse=fuse))
        for _ in range(steps):
            llm.engine.step()
            llm.engine.check()
        llm.engine.abort(f"r{steps}")
        assert_idle(llm)


def test_every_output_of_a_request_is_blended(checkpoint: Folder) -> None:
    one = blend(make_llm(checkpoint("llama")), SEVERAL, SOME)
    llm = make_llm(checkpoint("llama"))
    (both,) = llm.generate([SEVERAL], replace(PARAMS, n=2), fuse=SOME)
    assert_idle(llm)
    recorder: Any = llm.engine.runner
    for index in (0, 1):
        first = recorder.logits[both.request_id, index][0]
        assert worst(first, one.logits[0]) <= TOLERANCE


def test_the_report_says_what_was_computed_again(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint("llama"))
    answer = blend(llm, SEVERAL, Fuse("first", tokens=3))
    assert answer.recomputed == [0, 3, 3, 3]
    reuse = answer.output.reuse
    assert reuse.document_tokens_recomputed == 9
    assert "3 computed again" in str(reuse) and "fuse: first, tokens 3" in str(reuse)
    assert blend(llm, SEVERAL, None).output.reuse.fuse is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"selector": "last"}, "unknown selector 'last'"),
        ({"selector": "all", "ratio": 0.5}, "takes no budget"),
        ({"selector": "ape", "ratio": 0.5}, "takes temperature or scale"),
        ({"selector": "links", "threshold": 0.5}, "takes ratio or tokens"),
        ({"selector": "random", "ratio": 0.5, "tokens": 3}, "give one of"),
        ({"selector": "random", "ratio": 1.5}, "ratio must be"),
        ({"selector": "random", "tokens": -1}, "tokens must be"),
        ({"selector": "question", "watched_share": 0.0}, "watched_share must be"),
        ({"selector": "deviation", "check_layers": (0,)}, "check_layers must be ascending"),
        ({"selector": "deviation", "check_factors": (2.0, 1.0)}, "one per check layer"),
        ({"selector": "deviation", "check_factors": (0.5,)}, "the last of them 1"),
        (
            {"selector": "deviation", "threshold": 0.5, "check_factors": (1.0,)},
            "without a threshold",
        ),
        (
            {"selector": "deviation", "check_layers": (1, 2), "check_factors": (0.5, 1.0)},
            "never rise",
        ),
        (
            {"selector": "deviation", "check_layers": (1, 2), "check_factors": (math.nan, 1.0)},
            "finite number",
        ),
        ({"selector": "question", "check_factors": (1.0,)}, "not check_factors"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_policy_without_meaning_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason):
        Fuse(**options)


@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("selector", ["question", "links", "oracle"])
@pytest.mark.parametrize("family", ["llama", "smollm3"])
def test_what_is_chosen_is_what_dense_attention_chooses(
    checkpoint: Folder, family: str, selector: Any, ratio: float
) -> None:
    """The same passes on one dense prompt; its first document is exact, so it is left alone."""
    for seed in range(3):
        prompt = [LEAD, *(document(10 * seed + n, 30) for n in range(3)), words(2, 9)]
        llm = make_llm(checkpoint(family))
        answer = blend(llm, prompt, Fuse(selector, ratio=ratio))
        lead, *documents, text = (list(part.tokens) for part in answer.parts)
        dense = DenseBlend(llm.engine.runner.model, Prompt(lead, documents, text))
        dense.candidates = without_first(dense.candidates)
        chosen = dense.choose(make_selector(Fuse(selector, ratio=ratio)))
        assert answer.chosen == dense.candidates.positions[chosen].tolist()


def without_first(candidates: Candidates) -> Candidates:
    behind = candidates.documents > candidates.documents[0]
    positions = candidates.positions[behind]
    return Candidates(positions, candidates.documents[behind], (len(positions),))


def test_check_layers_that_the_model_has_not_are_refused(checkpoint: Folder) -> None:
    llm = make_llm(checkpoint("llama"))
    with pytest.raises(InvalidOption, match="the model's 3 layers"):
        llm.generate([SEVERAL], PARAMS, fuse=Fuse("deviation", check_layers=(1, 3)))


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 4}])
@pytest.mark.parametrize(
    ("layers", "factors"), [((1,), ()), ((2,), ()), ((1, 2), ()), ((1, 2), (2.5, 1.0))]
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
def test_deviation_chooses_and_computes_what_a_dense_pass_does(
    checkpoint: Folder,
    family: str,
    layers: tuple[int, ...],
    factors: tuple[float, ...],
    options: dict[str, Any],
) -> None:
    """Tokens go on from the pass that chose them; the text is computed over them."""
    prompt = [LEAD, *(document(n, 30) for n in range(3)), words(2, 9)]
    llm = make_llm(checkpoint(family), **options)
    fuse = Fuse("deviation", ratio=0.3, check_layers=layers, check_factors=factors)
    answer = blend(llm, prompt, fuse)
    lead, *documents, text = (list(part.tokens) for part in answer.parts)
    model = llm.engine.runner.model
    dense = DenseBlend(model, Prompt(lead, documents, text))
    dense.candidates = without_first(dense.candidates)
    selector = make_selector(fuse)
    assert isinstance(selector, Deviation)
    assert not factors or selector.factors == factors
    _, done, narrow = filtered(dense, selector)
    chosen = narrow.candidates.positions
    assert answer.chosen == chosen.tolist()
    keys, values = dense.keys.clone(), dense.values.clone()
    for layer, (k, v) in done.fresh.items():
        rows = dense.rows(torch.arange(len(dense.candidates)))
        for check in layers:
            if layer >= check:
                rows = done_rows(dense, selector, check)
        among = torch.searchsorted(rows, chosen)
        keys[layer][chosen], values[layer][chosen] = k[among], v[among]
    over = Pass(dense, list(keys), list(values), dense.text_rows)
    hidden, _ = dense.run(dense.text_rows, done=over)
    assert worst(answer.logits[:1], model.logits(hidden[-1:])) <= TOLERANCE


def done_rows(dense: DenseBlend, selector: Deviation, check: int) -> torch.Tensor:
    """The rows that a filtered pass has from check layer ``check`` on."""
    upto = tuple(layer for layer in selector.check_layers if layer <= check)
    factors = selector.factors[: len(upto)]
    _, _, narrow = filtered(dense, Deviation(selector.budget, upto, factors))
    return torch.cat((narrow.candidates.positions, dense.text_rows))


def test_requests_that_ask_by_their_text_ask_together_and_choose_as_alone(
    checkpoint: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two questions and two chases of links: as many passes as one chase takes."""
    fuses = [
        Fuse("question", ratio=0.3),
        Fuse("links", ratio=0.5),
        Fuse("question", tokens=9),
        Fuse("links", ratio=0.2),
    ]
    asked: list[Any] = [([*SEVERAL, words(20 + n, 4 + n)], fuse) for n, fuse in enumerate(fuses)]
    llm = make_llm(checkpoint("llama"))
    passes: list[int] = []
    received = TokenScoring._received

    def counted(self: TokenScoring, readers: Any, *rest: Any) -> Any:
        passes.append(len(readers))
        return received(self, readers, *rest)

    monkeypatch.setattr(TokenScoring, "_received", counted)
    alone = [blend(llm, *one) for one in asked]
    assert passes == [1] * (1 + 4 + 1 + 4)
    passes.clear()
    for mine, other in zip(blend_all(llm, asked), alone, strict=True):
        same(mine, other)
    assert passes == [4, 2, 2, 2]


@pytest.mark.parametrize("selector", ["links", "deviation"])
def test_pages_that_the_choice_leaves_over_are_given_back(
    checkpoint: Folder, selector: Any
) -> None:
    llm = make_llm(checkpoint("llama"))
    parts = llm.engine.prompts.from_parts([LEAD, *(document(n, 60) for n in range(3)), "?"])
    fuse = Fuse(selector, ratio=0.9 if selector == "links" else 0.1)
    progress = llm.engine.add(Request("a", parts, PARAMS, fuse=fuse))
    sequence = progress.outputs[0].sequence
    llm.engine.step()
    fusion = sequence.fusion
    assert fusion is not None
    before = len(fusion.pages)
    while sequence.phase is not Phase.DECODE:
        llm.engine.step()
        llm.engine.check()
    assert fusion.positions is not None
    assert len(fusion.pages) == -(-len(fusion.positions) // 16) < before
    llm.engine.abort("a")
    assert_idle(llm)
