"""The invariants of RetroAttention, on its plainest form, with which the engine has to agree."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from looseleaf.models import Decoder, load_weights, read_config
from tests.checkpoints import make_checkpoint
from tests.retro.dense import Choose, DenseRetro, Page, dense_sum

PAGE_SIZE = 4
WINDOWS = (1, 2, 4, 9)
Load = Callable[[int], Decoder]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A tiny decoder of so many layers, in fp64."""
    made: dict[int, Decoder] = {}

    def decoder(layers: int) -> Decoder:
        if layers not in made:
            folder = tmp_path_factory.mktemp("tiny") / f"{layers}"
            make_checkpoint(folder, "llama", num_hidden_layers=layers)
            config = read_config(folder)
            made[layers] = Decoder(config, load_weights(folder, config, torch.float64))
        return made[layers]

    return decoder


def some_pages(seed: int) -> Choose:
    """A choice that knows no query: about a third of the pages, others in every layer and step."""

    def choose(retro: DenseRetro, layer: int, q: Tensor, sealed: int) -> list[set[int]]:
        heads = range(retro.config.num_kv_heads)
        draw = [random.Random(f"{seed} {layer} {head} {retro.rows[0]}") for head in heads]
        return [{n for n in range(sealed) if d.random() < 0.35} for d in draw]

    return choose


def every_page(retro: DenseRetro, layer: int, q: Tensor, sealed: int) -> list[set[int]]:
    return [set(range(sealed)) for _ in range(retro.config.num_kv_heads)]


def make_retro(
    decoder: Decoder, choose: Choose | None, window: int, local: str = "exact"
) -> tuple[DenseRetro, list[int]]:
    """Behind two settled pages, one of them not full, a tail that begins with seven tokens."""
    settled = [Page(0, 4, 0), Page(4, 7, 0)]
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 300, (14 + 13,), generator=draw).tolist()
    config = decoder.config
    return DenseRetro(config, PAGE_SIZE, settled, 7, choose, window, local), tokens


def decode(decoder: Decoder, retro: DenseRetro, tokens: list[int]) -> Tensor:
    """The logits behind the prompt of 14 tokens, and behind every token of the output."""
    logits = [retro.prefill(decoder, tokens[:14])]
    logits += [retro.step(decoder, tokens[: 14 + n]) for n in range(1, 14)]
    return torch.stack(logits)


@pytest.mark.parametrize("local", ["exact", "stale"])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_full_budget_equals_dense_decode(load: Load, window: int, local: str) -> None:
    decoder = load(3)
    retro, tokens = make_retro(decoder, every_page, window, local)
    dense, _ = make_retro(decoder, None, 1)
    mine, other = decode(decoder, retro, tokens), decode(decoder, dense, tokens)
    torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_a_budget_that_is_not_full_changes_the_answer(load: Load) -> None:
    decoder = load(3)
    answers = []
    for choose, window in ((every_page, 1), (some_pages(1), 1), (some_pages(1), 4)):
        retro, tokens = make_retro(decoder, choose, window)
        answers.append(decode(decoder, retro, tokens)[-1])
    full, base, revised = answers
    assert (full - base).abs().max() > 1e-3
    assert (revised - base).abs().max() > 1e-3


@contextmanager
def queries_of(retro: DenseRetro) -> Iterator[dict[int, Tensor]]:
    """The query of every row, in a model of one layer."""
    queries: dict[int, Tensor] = {}
    revised = retro.revised

    def watched(layer: int, q: Tensor, position: int, chosen: list[set[int]]) -> Tensor:
        queries[position] = q
        return revised(layer, q, position, chosen)

    retro.revised = watched  # type: ignore[method-assign]
    yield queries


@pytest.mark.parametrize("local", ["exact", "stale"])
@pytest.mark.parametrize("window", WINDOWS)
def test_in_one_layer_a_revised_output_is_attention_over_the_union_of_pages_read(
    load: Load, window: int, local: str
) -> None:
    decoder = load(1)
    choose = some_pages(2)
    retro, tokens = make_retro(decoder, choose, window, local)
    with queries_of(retro) as queries:
        decode(decoder, retro, tokens)
    heads = range(decoder.config.num_kv_heads)
    end = retro.rows[0]
    for position in range(14, end + 1):
        union: list[set[int]] = [set() for _ in heads]
        for step in range(position, min(position + window, end + 1)):
            retro.rows = list(range(step, max(13, step - window), -1))
            sealed, count = retro.num_sealed, len(retro.pages)
            # what is not sealed yet is read in any case, and when it is sealed once more
            others = set(range(sealed, count))
            others |= retro.just_sealed(sealed) if local == "exact" else set()
            for head, some in enumerate(choose(retro, 0, queries[step], sealed)):
                union[head] |= some | others
        expected = dense_sum(retro, 0, queries[position], position, union)
        torch.testing.assert_close(retro.outputs[0, position], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", WINDOWS)
def test_values_of_one_give_an_output_of_one(load: Load, window: int) -> None:
    decoder = load(3)
    retro, tokens = make_retro(decoder, some_pages(3), window)

    def ones(layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        out = retro(layer, q, k, torch.ones_like(v))
        torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-12)
        return out

    retro.rows, retro.first_output = list(range(14)), 14
    decoder.forward(torch.tensor(tokens[:14]), ones)
    for newest in range(14, 27):
        retro.rows = list(range(newest, max(13, newest - window), -1))
        decoder.forward(torch.tensor([tokens[p] for p in retro.rows]), ones)
