"""What `bench hosted` makes and searches: the same recall for every kind, memory of its own."""

import pytest
import torch

from looseleaf.config import IndexConfig
from looseleaf.errors import InvalidOption
from looseleaf.index import Heads
from looseleaf_lab.bench.hosted_layers import SyntheticKeys, build_layer, fill, host_layers

CPU = torch.device("cpu")
HEADS = Heads(2, 8, 2)
TOKENS = 1500


@pytest.fixture(scope="module")
def made() -> SyntheticKeys:
    return SyntheticKeys.create("clustered", TOKENS, HEADS, 2, 24, torch.float32)


@pytest.mark.parametrize("kind", ["flat", "ivf", "graph"])
@pytest.mark.parametrize("keys", ["stored", "int8"])
def test_every_kind_searches_as_long_as_the_recall_takes(
    made: SyntheticKeys, kind: str, keys: str
) -> None:
    config = IndexConfig(kind, keys=keys, degree=8)  # type: ignore[arg-type]
    exact = made.exact(config, 20, CPU)
    built = build_layer(
        made, HEADS, config, exact=exact, target_recall=0.9, device=CPU, workers=2, threads=1
    )
    assert 0.9 <= built.recall <= (1.0 if kind == "flat" else 0.99)
    assert (built.scanned == 1.0) == (kind == "flat")
    kv = torch.empty(HEADS.num_layers, 2, HEADS.num_kv_heads, TOKENS, 128)
    fill(kv, made)
    segment = host_layers(made, kv, built, Heads(5, 8, 2))
    assert segment.index is not None and segment.ready
    units = segment.index.units
    assert set(units) == {(layer, head) for layer in range(5) for head in range(2)}
    for layer, head in units:
        assert torch.equal(segment.kv[layer, 0, head], made.keys[head])
        assert units[layer, head] is units[layer % 2, head]
    for vectors in (lambda unit: unit.keys.vectors, lambda unit: unit.keys.source.vectors):
        assert len({vectors(unit).data_ptr() for unit in units.values()}) == 4
    if kind == "graph":
        assert len({unit.links.data_ptr() for unit in units.values()}) == 4  # type: ignore[attr-defined]


def test_fewer_tokens_are_the_first_ones(made: SyntheticKeys) -> None:
    few = made.first(300)
    assert (
        torch.equal(few.keys, made.keys[:, :300])
        and len(few.build_queries[0]) == len(made.build_queries[0]) // 5
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes it")
def test_without_a_gpu_the_bench_says_what_to_use() -> None:
    from looseleaf_lab.bench.hosted import HostedBench

    with pytest.raises(InvalidOption, match="bench index"):
        HostedBench(
            "tiny", "clustered", (512,), ("flat",), (1,), True, 2, 1, 1, 10, 0.9, 0.2, 1, 1, 1
        )  # fmt: skip
    with pytest.raises(InvalidOption, match="unknown shape"):
        HostedBench(
            "huge", "clustered", (512,), ("flat",), (1,), True, 2, 1, 1, 10, 0.9, 0.2, 1, 1, 1
        )  # fmt: skip
