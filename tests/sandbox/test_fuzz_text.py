"""Templates and tokenizers drawn at random end in time: a short form of `tools.fuzz_text`."""

from tools.fuzz_text import run


def test_what_is_drawn_ends_in_time_with_a_sentence() -> None:
    ends = run(seed=1, rounds=12)
    assert sum(ends.values()) == 24
    # the draw has both kinds
    assert any("plain" in name for name in ends)
    assert any(name in ends for name in ("template: limit", "template: refused"))
