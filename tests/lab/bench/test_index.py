"""Indexes are measured on keys that queries do not resemble, and literal RoarGraph gets lost."""

from pathlib import Path

import pytest
import torch

from looseleaf.config import IndexConfig
from looseleaf.errors import InvalidOption
from looseleaf_lab.bench.index import measure
from looseleaf_lab.bench.index_layers import Layer, reference_layers, synthetic_layer
from looseleaf_lab.bench.index_plot import draw
from looseleaf_lab.evals.world import make_example


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    layer = synthetic_layer("clustered", 3000, 40)
    return [dict(row) for row in measure(iter([layer]), IndexConfig())]


def test_every_arm_has_rows_with_its_share_and_its_recall(rows: list[dict[str, object]]) -> None:
    flat = [row for row in rows if row["index"] == "flat"]
    assert [(row["recall"], row["scanned"]) for row in flat] == [(1.0, 1.0)]
    names = {str(row["index"]) for row in rows}
    assert {"ivf", "graph", "HNSW (faiss)", "RoarGraph, enhanced"} <= names
    assert any(name.startswith("chosen: ") for name in names)
    assert all(0 < float(str(row["scanned"])) < 1.1 for row in rows)


def test_the_published_projection_finds_nothing_and_ours_does(
    rows: list[dict[str, object]],
) -> None:
    def best(name: str) -> float:
        return max(float(str(row["recall"])) for row in rows if row["index"] == name)

    assert best("RoarGraph, projection") < 0.05
    assert best("graph") > 0.95


@pytest.mark.parametrize("kind", ["clustered", "unclustered"])
def test_queries_of_synthetic_layers_are_far_from_the_keys(kind: str) -> None:
    assert synthetic_layer(kind, 4000, 200).mismatch > 2
    near = synthetic_layer(kind, 4000, 200)
    same = Layer("same", near.keys, near.queries, near.keys[:200])
    assert 0.9 < same.mismatch < 1.1


def test_layers_of_the_reference_model_are_its_own() -> None:
    texts = make_example("lookup", 0).documents
    layers = list(reference_layers(texts, 200, (0, 7), 50))
    assert [layer.name for layer in layers] == ["reference, layer 0", "reference, layer 7"]
    assert layers[0].keys.shape == (120, 64) and layers[0].queries.shape == (550, 64)
    assert not torch.equal(layers[0].keys, layers[1].keys)
    with pytest.raises(InvalidOption, match="exceed"):
        next(reference_layers(texts, 30_000, (0,), 5))
    with pytest.raises(InvalidOption, match="add texts"):
        next(reference_layers(texts[:1], 4000, (0,), 5))
    with pytest.raises(InvalidOption, match="unknown index 'tree'"):
        next(measure(iter([]), IndexConfig(), ["tree"]))
    with pytest.raises(InvalidOption, match="unknown layer"):
        synthetic_layer("round", 100, 5)


def test_the_plot_shows_what_was_measured(rows: list[dict[str, object]], tmp_path: Path) -> None:
    draw(rows, tmp_path / "index.png")  # type: ignore[arg-type]
    assert (tmp_path / "index.png").stat().st_size > 5000
