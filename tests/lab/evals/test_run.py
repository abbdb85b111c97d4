"""Running a task: what is kept is not asked again, what changed is; what rows say is what came."""

from dataclasses import replace
from pathlib import Path

import pytest

from looseleaf.errors import InvalidOption
from looseleaf_lab.evals.figures import summarize
from looseleaf_lab.evals.run import AnswerFile, Runner, Source
from looseleaf_lab.evals.task import Item
from tests.lab.evals.conftest import Knower, Sums

SOURCE = Source("abc", "m", "w")
SEEDS = range(10)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        Runner(SOURCE, AnswerFile(path), 2).run(Sums(), Knower(fails_after=4), SEEDS)
    arm = Knower()
    heard: list[int] = []
    scored = Runner(SOURCE, AnswerFile(path), 2).run(Sums(), arm, SEEDS, heard.append)
    assert arm.asked == ["4", "5", "6", "7", "8", "9"]
    assert heard == [4, 6, 8, 10]
    assert [one.item.key for one in scored] == [str(seed) for seed in SEEDS]
    assert all(one.metrics["exact"] == 1.0 for one in scored)
    assert all(one.answer.report == {"effort": 0.5} for one in scored)


@pytest.mark.parametrize(
    "other", [Source("abd", "m", "w"), Source("abc", "n", "w"), Source("abc", "m", "v")]
)
def test_answers_of_other_code_or_another_model_are_not_taken(
    tmp_path: Path, other: Source
) -> None:
    answers = AnswerFile(tmp_path / "answers.jsonl")
    Runner(SOURCE, answers).run(Sums(), Knower(), SEEDS)
    arm = Knower()
    Runner(other, answers).run(Sums(), arm, SEEDS)
    assert len(arm.asked) == len(SEEDS)


def test_an_arm_of_another_name_is_asked_anew(tmp_path: Path) -> None:
    answers = AnswerFile(tmp_path / "answers.jsonl")
    Runner(SOURCE, answers).run(Sums(), Knower(), SEEDS)
    arm = Knower(name="other")
    Runner(SOURCE, answers).run(Sums(), arm, SEEDS)
    assert len(arm.asked) == len(SEEDS)


def test_an_item_of_the_same_name_with_another_prompt_is_asked_anew(tmp_path: Path) -> None:
    answers = AnswerFile(tmp_path / "answers.jsonl")
    Runner(SOURCE, answers).run(Sums(), Knower(), SEEDS)

    class Others(Sums):
        def items(self, seeds: range) -> list[Item]:
            return [replace(item, question="plus 1?") for item in super().items(seeds)]

    arm = Knower()
    Runner(SOURCE, answers).run(Others(), arm, SEEDS)
    assert len(arm.asked) == len(SEEDS)


def test_items_that_differ_in_any_part_of_the_prompt_have_other_fingerprints() -> None:
    item = Item("1", ("a", "b"), "q", ("x",))
    others = [
        Item("1", ("ab",), "q", ("x",)), Item("1", ("a", "b"), "r", ("x",)),
        Item("1", ("b", "a"), "q", ("x",)), Item("1", ("a", "b"), "q", ("x",), 97),
        Item("1", ("a", "b"), "q", ("x",), before="a"), Item("1", ("b",), "q", ("x",), before="a"),
    ]  # fmt: skip
    assert len({one.fingerprint() for one in (item, *others)}) == 7


def test_a_line_cut_off_by_a_crash_is_dropped_and_a_foreign_file_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    Runner(SOURCE, AnswerFile(path)).run(Sums(), Knower(), range(3))
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[:-20], encoding="utf-8")
    again = AnswerFile(path)
    assert len(again) == 2
    arm = Knower()
    Runner(SOURCE, again).run(Sums(), arm, range(3))
    assert arm.asked == ["2"]
    assert path.read_text(encoding="utf-8") == whole
    path.write_text("date,commit\n1,2\n", encoding="utf-8")
    with pytest.raises(InvalidOption, match=r"line 1 of .* is no answer"):
        AnswerFile(path)


def test_a_file_of_answers_that_can_not_be_kept_is_told_before_anything_is_asked(
    tmp_path: Path,
) -> None:
    file, binary = tmp_path / "file", tmp_path / "binary"
    file.write_text("", encoding="utf-8")
    binary.write_bytes(b"\xff\xfe\n")
    for path in (file / "answers.jsonl", tmp_path, binary):
        with pytest.raises(InvalidOption, match="choose another file with --answers"):
            AnswerFile(path)
    assert len(AnswerFile(tmp_path / "new" / "answers.jsonl")) == 0


def test_a_foreign_file_without_a_last_line_feed_is_refused_and_left_as_it_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / "notes.txt"
    kept = tmp_path / "answers.jsonl"
    Runner(SOURCE, AnswerFile(kept)).run(Sums(), Knower(), range(1))
    line = kept.read_text(encoding="utf-8")
    for text in ("my notes", "date,commit\n1,2", f"{line}my notes"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InvalidOption, match="is no answer"):
            AnswerFile(path)
        assert path.read_text(encoding="utf-8") == text
    for cut in ("{", '{"of": ["abc", "m'):
        path.write_text(line + cut, encoding="utf-8")
        assert len(AnswerFile(path)) == 1
        assert path.read_text(encoding="utf-8") == line


def test_rows_have_the_mean_the_interval_and_the_gain_over_the_first_arm() -> None:
    runner = Runner(SOURCE)
    bad = runner.run(Sums(), Knower(wrong=(0, 1, 2)), SEEDS)
    good = runner.run(Sums(), Knower(wrong=(0,), name="good"), SEEDS)
    figures = summarize("m", Sums(), Knower(name="good"), SEEDS, good, ("bad", bad))
    exact, length, effort = figures
    assert (exact.metric, exact.items, exact.value, exact.seeds) == ("exact", 10, 0.9, "0-9")
    assert (exact.against, exact.gain) == ("bad", pytest.approx(0.2))
    assert exact.gain_low < 0.2 < exact.gain_high
    assert (length.metric, effort.metric, effort.value) == ("length", "effort", 0.5)
    assert length.against == "" and effort.low == effort.high == 0.5
