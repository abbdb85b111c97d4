"""``bench select`` counts what it says it reads."""

import torch

from looseleaf.bench.results import Row
from looseleaf.bench.select import SelectBench, measure
from looseleaf.config import Select


def test_rows_say_what_dense_decoding_and_a_policy_read() -> None:
    policy = Select("quest", tokens=64, dense_layers=(0,))
    heard: list[Row] = []
    bench = SelectBench("tiny", policy, (320,), (2,), 2, 1, torch.device("cpu"))
    rows = measure(bench, heard.append)
    assert rows == heard and [row["what"] for row in rows] == ["attention", "token"]
    attention = rows[0]
    # two rows of 20 pages, two KV heads of 16 dims, keys and values in bf16 or fp32
    itemsize = attention["dense_mb"] * 1e6 / (2 * 20 * 2 * 2 * 16 * 16)  # type: ignore[operator]
    assert round(itemsize) in (2, 4)
    pages = 2 * 2 * 4 * 2 * 16 * 16 * itemsize
    bounds = 2 * 2 * 19 * 2 * 16 * itemsize
    assert abs(attention["select_mb"] * 1e6 - pages - bounds) < 1  # type: ignore[operator]
