"""Statistics of a load from given times."""

import pytest

from looseleaf_lab.bench.endpoint.figures import Answer, percentile, summarize


def test_a_percentile_is_the_smallest_value_that_covers_the_share() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.07, 0.99, 1.0)] == [50, 7, 99, 100]
    assert percentile([3.0], 0.01) == 3.0
    assert percentile([], 0.5) == 0.0


def test_figures_follow_from_the_times_of_chunks() -> None:
    streamed = Answer(10.0, (10.5, 10.6, 11.0), tokens=6, prompt_tokens=8)
    short = Answer(10.0, (12.0,), tokens=1, prompt_tokens=4)
    figures = summarize([streamed, short])
    expected = {
        "first_token_p50_ms": 500, "first_token_p99_ms": 2000, "first_token_max_ms": 2000,
        "per_token_p50_ms": 100, "gap_p50_ms": 100, "gap_p99_ms": 400, "gap_max_ms": 400,
        "tokens_per_s": 3.5, "prompt_tokens": 6, "output_tokens": 3.5,
    }  # fmt: skip
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_errors_count_by_kind_and_add_no_times() -> None:
    failures = [Answer(0.0, (9.0,), 5, error=kind) for kind in ("timeout", "status 429", "timeout")]
    figures = summarize([Answer(0.0, (1.0,), 1), *failures])
    assert figures["errors"] == "status 429: 1, timeout: 2"
    assert (figures["requests"], figures["complete"]) == (4, 1)
    assert figures["first_token_max_ms"] == 1000
    assert summarize(failures)["tokens_per_s"] == 0.0
