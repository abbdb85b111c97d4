"""Exact neighbours, tile by tile, equal those of the whole score matrix."""

import pytest
import torch

from looseleaf.errors import InvalidOption
from looseleaf.ops.nearest_keys import nearest_keys, reference


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_find_what_the_whole_matrix_has(
    monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    monkeypatch.setitem(reference._TILE, "cpu", (700, 1 << 15))
    torch.manual_seed(0)
    q, keys = torch.randn(50, 16), torch.randn(333, 16)
    bounds = torch.randint(0, 334, (50,)) if causal else None
    scores = q.double() @ keys.double().T
    if bounds is not None:
        scores[torch.arange(333) >= bounds[:, None]] = -torch.inf
    expected = scores.topk(20)
    found = nearest_keys(q, keys, 20, bounds)
    there = expected.values > -torch.inf
    torch.testing.assert_close(found.scores.double(), expected.values, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.ids >= 0, there)
    assert torch.equal(found.ids[there].long(), expected.indices[there])


def test_a_query_that_sees_fewer_keys_has_fewer_neighbours() -> None:
    q, keys = torch.ones(3, 4), torch.ones(5, 4)
    found = nearest_keys(q, keys, 8, torch.tensor([0, 2, 5]))
    assert (found.ids >= 0).sum(1).tolist() == [0, 2, 5]
    assert (found.scores > -torch.inf).sum(1).tolist() == [0, 2, 5]


def test_memory_is_a_tile_of_scores_not_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    topk = torch.Tensor.topk

    def watched(self: torch.Tensor, *args: int, **kwargs: int) -> object:
        nonlocal largest
        largest = max(largest, self.numel())
        return topk(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "topk", watched)
    monkeypatch.setitem(reference._TILE, "cpu", (1 << 14, 1 << 15))
    nearest_keys(torch.randn(300, 8), torch.randn(4000, 8), 10)
    assert 0 < largest <= 1 << 14


def test_no_neighbours_and_unknown_implementations_are_refused() -> None:
    with pytest.raises(InvalidOption, match="at least one"):
        nearest_keys(torch.ones(1, 4), torch.ones(1, 4), 0)
    with pytest.raises(InvalidOption, match="native"):
        nearest_keys(torch.ones(1, 4), torch.ones(1, 4), 1, implementation="native")
