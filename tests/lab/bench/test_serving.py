"""``bench serving`` at toy size: every line is measured, and every floor lies below it."""

import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from looseleaf.errors import InvalidOption
from looseleaf.types import AttnState
from looseleaf_lab.bench import attention
from looseleaf_lab.bench import serving as bench_serving
from looseleaf_lab.bench.ceilings import Ceilings
from looseleaf_lab.bench.random_model import random_decoder
from looseleaf_lab.bench.serving import LINES, Row, ServingSizes, ServingVariant, Workbench, measure
from looseleaf_lab.cli.bench.commands import serving
from looseleaf_lab.errors import BenchmarkRefused

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", ["tiny", "tiny-sinks"])
def test_every_line_is_measured_beside_its_floor(shape: str) -> None:
    rows = list(measure(shape, ServingSizes.of_shape(shape), CPU))
    assert len(rows) == 7 + 1 + 2
    assert len({tuple(row) for row in rows}) == 1
    for row in rows:
        assert 0 < row["looseleaf_low"] <= row["looseleaf"] <= row["looseleaf_high"]
    assert all(0 < row["roofline_share"] < 1 for row in rows[:-1])
    assert [row["unit"] for row in rows].count("tokens/s") == 1


def test_the_device_is_measured_before_an_engine_takes_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind it there is no room for that on a card of 80 GB."""
    order = []
    for name in ("measure_ceilings", "random_engine"):
        real = getattr(bench_serving, name)
        monkeypatch.setattr(
            bench_serving, name, lambda *arguments, n=name, f=real: order.append(n) or f(*arguments)
        )
    Workbench.create("tiny", ServingSizes.small(), CPU)
    assert order == ["measure_ceilings", "random_engine"]


def test_the_pool_holds_the_largest_line_and_not_all_of_them() -> None:
    """Weights, 24 private texts of 16K and the work space of a step fit in 80 GB."""
    tokens = 16 * ServingSizes().pages
    assert 24 * (16_384 + 64 + 128) <= tokens < 1.05 * 24 * (16_384 + 64 + 128)


def test_only_the_lines_that_are_named_are_measured() -> None:
    rows = list(measure("tiny", ServingSizes.small(), CPU, lines=("prefill",)))
    assert [row["measurement"] for row in rows] == ["prefill of 208 tokens, one request"]


@pytest.mark.parametrize("operator", ["partial_attention", "prefill_attention"])
def test_nothing_is_timed_while_attention_is_wrong(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(attention, operator)

    def wrong(*arguments: Any) -> AttnState:
        state = right(*arguments)
        return AttnState(1.1 * state.out, state.lse)

    monkeypatch.setattr(attention, operator, wrong)
    with pytest.raises(BenchmarkRefused, match="run the tests of the operators"):
        next(measure("tiny", ServingSizes.small(), CPU))


def test_the_command_offers_every_line() -> None:
    option = next(param for param in serving.params if param.name == "lines")
    assert list(option.type.choices) == list(LINES)


def test_an_interrupted_run_keeps_the_lines_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(measure("tiny", ServingSizes.small(), CPU, lines=("prefill",)))

    def interrupted(*_: object) -> Iterator[Row]:
        yield from rows
        raise KeyboardInterrupt

    monkeypatch.setattr("looseleaf_lab.bench.serving.measure", interrupted)
    path = tmp_path / "serving.csv"
    result = CliRunner().invoke(serving, ["--shape", "tiny", "--output", str(path)])
    assert result.exit_code == 1
    assert len(path.read_text().splitlines()) == 2


def test_what_is_there_before_measuring_is_not_collected_meanwhile() -> None:
    rows = measure("tiny", ServingSizes.small(), CPU, lines=("prefill",))
    next(rows)
    assert gc.get_freeze_count() > 10_000
    rows.close()
    assert gc.get_freeze_count() < 1000


def test_a_floor_is_what_takes_longer() -> None:
    ceilings = Ceilings(bytes_per_second=100.0, flops_per_second=1000.0)
    assert ceilings.floor(200.0, 500.0) == 2.0
    assert ceilings.floor(20.0, 500.0) == 0.5


def test_cached_documents_are_computed_once() -> None:
    """The line about cached documents would say nothing if they were not."""
    sizes = dataclasses.replace(ServingSizes.small(), question=8)
    bench = Workbench.create("tiny", sizes, CPU)
    documents = [bench.document() for _ in range(5)]
    bench.run([(*documents, bench.question())], 1)
    before = bench.engine.counters.prompt_tokens
    bench.run([bench.shuffled(documents, 5)], 1)
    assert bench.engine.counters.prompt_tokens - before == sizes.question


def test_a_variant_is_what_the_engine_is_made_with_and_stands_in_its_rows() -> None:
    variant = ServingVariant(kv_dtype="fp8", batch_invariant=True)
    bench = Workbench.create("tiny", ServingSizes.small(), CPU, variant)
    assert bench.name == "tiny, random, fp8 pages, batch-invariant"
    runner = bench.engine.runner
    assert runner.pool.kv.dtype is torch.float8_e4m3fn
    assert runner.attention.batch_invariant
    usual = Workbench.create("tiny", ServingSizes.small(), CPU)
    usual.ceilings = bench.ceilings
    # a key is a quarter of what it is in fp32
    assert bench.floor(1, 10**9, 1.0) == pytest.approx(usual.floor(1, 10**9, 1.0) / 4, rel=0.01)


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"llama-3\.1-8b"):
        Workbench.create("unheard-of", ServingSizes.small(), CPU)


def test_a_floor_counts_the_bytes_of_quantized_weights() -> None:
    sizes = ServingSizes.small()
    wide = Workbench.create("tiny", sizes, CPU)
    ceilings = dataclasses.replace(wide.ceilings, flops_per_second=1e30)
    narrow = Workbench.create("tiny", sizes, CPU, ServingVariant(quantize="int8"))
    floors = []
    for bench in (wide, narrow):
        bench.ceilings = ceilings
        floors.append(bench.floor(1, 0, 0))
    assert 0.25 < floors[1] / floors[0] < 0.9


def test_all_matrices_are_in_blocks() -> None:
    weights = random_decoder("tiny", CPU, blocks="Q8_0").weights
    plain = random_decoder("tiny", CPU).weights
    # 34 bytes for 32 values; the head is whole groups of outputs
    assert weights.lm_head.weight.nbytes == plain.embedding.numel() * 34 // 32
    assert weights.layers[0].qkv.weight.nbytes < plain.layers[0].qkv.weight.nbytes / 3
    assert ServingVariant(blocks="Q8_0").changes == ["Q8_0 weights"]


def test_blocks_are_another_form_than_codes() -> None:
    with pytest.raises(InvalidOption, match="leave one"):
        random_decoder("tiny", CPU, "int8", "Q8_0")
