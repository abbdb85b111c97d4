"""The laws of blending, on dense attention: the ends, the mask, and what the rules find."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from looseleaf.assets import __file__ as assets_file
from looseleaf.blend import (
    Budget,
    Candidates,
    Deviation,
    FirstK,
    Links,
    Question,
    RandomTokens,
    RowFilter,
    Selector,
    kv_deviation,
)
from looseleaf.models import Decoder, Tokenizer, load_weights, read_config
from looseleaf_lab.evals.world import Example, make_example
from tests.blend.dense import DenseBlend, Pass, Prompt
from tests.checkpoints import make_checkpoint

CAUSAL = Path(assets_file).parent / "causal"


def load(folder: Path) -> Decoder:
    config = read_config(folder)
    return Decoder(config, load_weights(folder, config, torch.float32))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def blend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DenseBlend:
    """A tiny model and a prompt whose documents differ in length; one is a single token."""
    model = load(make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", request.param))
    draw = torch.Generator().manual_seed(1)
    lengths = (4, 17, 1, 23, 6)
    parts = [torch.randint(3, 300, (n,), generator=draw).tolist() for n in lengths]
    return DenseBlend(model, Prompt(parts[0], parts[1:-1], parts[-1]))


def full_prefill(blend: DenseBlend) -> tuple[Tensor, Pass]:
    """Every token of the prompt, over no stored key at all."""
    empty = [torch.full_like(k, torch.nan) for k in blend.keys]
    rows = torch.arange(len(blend.tokens))
    return blend.run(rows, done=Pass(blend, empty, empty, rows))


def deviation_scores(blend: DenseBlend, done: Pass):  # type: ignore[no-untyped-def]
    """What an engine does at a check layer: project, turn, compare with what is stored."""

    def score(layer: int, hidden: Tensor, rows: Tensor) -> Tensor:
        k, v = blend.model.keys_values(layer, hidden)
        at = done.positions[rows]
        stored = blend.keys[layer][at], blend.values[layer][at]
        return kv_deviation(blend.turn(layer, k, at), v, *stored)

    return score


def filtered(blend: DenseBlend, selector: Deviation) -> tuple[Tensor, Pass, RowFilter]:
    """A pass that begins with every row and is narrowed between layers."""
    rows = blend.rows(torch.arange(len(blend.candidates)))
    done = Pass(blend, list(blend.keys), list(blend.values), rows)
    candidate_rows = torch.arange(len(blend.candidates))
    scores = deviation_scores(blend, done)
    narrow = RowFilter(selector, blend.candidates, candidate_rows, len(rows), scores)

    def hook(layer: int, hidden: Tensor) -> Tensor:
        left = narrow(layer, hidden)
        done.rows = narrow.rows
        return left

    return *blend.run(rows, hook, done), narrow


def test_ratio_one_equals_full_prefill(blend: DenseBlend) -> None:
    expected, _ = full_prefill(blend)
    rows = blend.rows(torch.arange(len(blend.candidates)))
    torch.testing.assert_close(blend.run(rows)[0], expected[rows], rtol=1e-4, atol=1e-4)
    narrowed, _, _ = filtered(blend, Deviation(Budget(ratio=1.0), (1, 2)))
    torch.testing.assert_close(narrowed, expected[rows], rtol=1e-4, atol=1e-4)


def test_ratio_zero_equals_plain_reuse(blend: DenseBlend) -> None:
    expected, _ = blend.run(blend.text_rows)
    for selector in (Question(Budget(ratio=0.0)), Links(Budget(ratio=0.0))):
        rows = blend.rows(blend.choose(selector))
        assert torch.equal(blend.run(rows)[0], expected)


@pytest.mark.parametrize("selector", [FirstK(2), RandomTokens(Budget(ratio=0.3))], ids=repr)
def test_a_later_key_perturbed_changes_no_earlier_row(
    blend: DenseBlend, selector: Selector
) -> None:
    rows = blend.rows(blend.choose(selector))
    cut = int(blend.candidates.positions[len(blend.candidates) // 2])
    keys, values = blend.keys.clone(), blend.values.clone()
    keys[:, cut:] += 1.0
    values[:, cut:] -= 1.0
    before, _ = blend.run(rows)
    after, _ = blend.run(rows, done=Pass(blend, list(keys), list(values), rows))
    earlier = rows < cut
    assert torch.equal(before[earlier], after[earlier])
    assert not torch.equal(before[~earlier], after[~earlier])


def test_the_first_document_has_no_deviation_and_nothing_of_it_is_selected(
    blend: DenseBlend,
) -> None:
    # it stands where it was encoded; fp32 rounding is all that may differ
    _, _, narrow = filtered(blend, Deviation(Budget(threshold=1e-3), (1,)))
    first = int(blend.candidates.documents.min())
    assert (narrow.candidates.documents != first).all()
    assert len(narrow.candidates) > 0


def test_gradual_filtering_keeps_texts_and_each_layers_share(blend: DenseBlend) -> None:
    selector = Deviation(Budget(ratio=0.4), (1, 2), (1.5, 0.5))
    hidden, done, narrow = filtered(blend, selector)
    total, text = len(blend.candidates), len(blend.text_rows)
    counts = [len(done.queries[layer]) - text for layer in range(3)]
    assert counts == [total, int(0.6 * total), int(0.2 * total)]
    assert len(hidden) == len(narrow.rows) == counts[-1] + text
    assert narrow.rows[-text:].tolist() == list(range(total, total + text))


def test_gradual_filtering_of_a_batch_is_that_of_each_request() -> None:
    draw = torch.Generator().manual_seed(0)
    lengths, texts = (12, 0, 20), 2
    scores = torch.rand(sum(lengths), generator=draw)
    selector = Deviation(Budget(ratio=0.5), (1, 3), (1.25, 0.75))

    def run(which: list[int]) -> list[list[float]]:
        """The scores that are left of each request; a request's rows end with two of text."""
        own = [scores[sum(lengths[:r]) : sum(lengths[: r + 1])] for r in which]
        rows, start = [], 0
        for part in own:
            rows.append(torch.arange(len(part)) + start)
            start += len(part) + texts
        hidden = torch.full((start, 1), 9.0)
        hidden[torch.cat(rows), 0] = torch.cat(own)
        numbers = torch.ones(sum(map(len, own)), dtype=torch.long)
        among = Candidates(torch.cat(rows), numbers, tuple(map(len, own)))
        narrow = RowFilter(selector, among, torch.cat(rows), start, lambda _l, h, _r: h[:, 0])
        for layer in range(5):
            hidden = narrow(layer, hidden)
        assert int((hidden == 9.0).sum()) == texts * len(which)
        left = hidden[hidden[:, 0] != 9.0, 0].split(list(narrow.candidates.lengths))
        return [part.tolist() for part in left]

    assert run([0, 1, 2]) == [run([0])[0], run([1])[0], run([2])[0]]
    assert [len(part) for part in run([0, 1, 2])] == [4, 0, 7]


def test_a_chase_follows_links_from_document_to_document() -> None:
    # the question reads token 90 only; 90 reads 50, 50 reads 10; nothing else is linked
    candidates = Candidates(torch.arange(100), torch.arange(100) // 20 + 1, (100,))
    links = Links(Budget(tokens=10))
    scores = torch.linspace(0.02, 0.01, 100)
    scores[90] = 0.5
    chase, found = links.begin(candidates, scores), []
    for target in (50, 10, None):
        found.append(chase.scouts.tolist())
        strength = torch.zeros(100)
        if target is not None:
            strength[target] = 0.4
        chase = links.follow(candidates, chase, strength)
    assert [90 in found[0], 50 in found[1], 10 in found[2]] == [True] * 3
    chosen = links.select(candidates, chase.scores)
    assert {10, 50, 90} <= set(chosen.tolist())
    assert len(chosen) + sum(links.scout_cost(candidates)) <= 10


@pytest.fixture(scope="module")
def reference() -> tuple[Decoder, Tokenizer]:
    return load(CAUSAL), Tokenizer(CAUSAL)


def answers(reference: tuple[Decoder, Tokenizer], example: Example, selector: Selector) -> bool:
    """Whether greedy decoding behind the blended prompt gives the expected answer."""
    model, tokenizer = reference
    content: list[object] = [{"type": "document"} for _ in example.documents]
    content.append({"type": "text", "text": example.question})
    runs = tokenizer.encode_chat([{"role": "user", "content": content}])
    answer = [*tokenizer.encode(example.answer), min(tokenizer.eos_token_ids)]
    documents = [tokenizer.encode_document(text) for text in example.documents]
    text = list(runs[-1])
    blend = DenseBlend(model, Prompt(list(runs[0]), documents, text + answer[:-1]))
    hidden, _ = blend.run(blend.rows(blend.choose(selector, len(text))))
    return model.logits(hidden[-len(answer) :]).argmax(-1).tolist() == answer


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_what_the_question_reads_and_its_links_carry_the_chain(
    reference: tuple[Decoder, Tokenizer], hops: int
) -> None:
    examples = [make_example("chain", seed, hops=hops) for seed in range(3)]
    ten_percent = Budget(ratio=0.1)
    by_rule = {
        type(selector): sum(answers(reference, e, selector) for e in examples)
        for selector in (Question(ten_percent), Links(ten_percent), FirstK(0))
    }
    assert (by_rule[Links], by_rule[FirstK]) == (3, 0)
    # the question reads the last link of a chain; nothing tells it of those before
    if hops == 1:
        assert by_rule[Question] == 3
    elif hops == 3:
        assert by_rule[Question] < 3
