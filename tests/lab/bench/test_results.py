"""Result files only grow, and figures are taken in turn."""

import csv
import subprocess
from pathlib import Path

import pytest

from looseleaf.errors import InvalidOption
from looseleaf_lab.bench import origin
from looseleaf_lab.bench.origin import describe_origin
from looseleaf_lab.bench.results import append_rows, require_appendable
from looseleaf_lab.bench.timing import measure_in_turn

ORIGIN = {"commit": "abc"}


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "results" / "speed.csv"
    append_rows(path, [{"name": "a", "value": 1.23456}], ORIGIN)
    append_rows(path, [{"name": "b", "value": 2}], ORIGIN)
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert [(row["commit"], row["name"], row["value"]) for row in rows] == [
        ("abc", "a", "1.235"),
        ("abc", "b", "2"),
    ]


def test_a_file_with_other_columns_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "speed.csv"
    append_rows(path, [{"name": "a"}], ORIGIN)
    before = path.read_bytes()
    with pytest.raises(InvalidOption, match="choose another file"):
        append_rows(path, [{"other": "a"}], ORIGIN)
    assert path.read_bytes() == before


def test_a_file_that_can_not_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidOption, match="rows can't be written to"):
        append_rows(tmp_path / "file" / "speed.csv", [{"name": "a"}], ORIGIN)


def test_what_rows_can_not_be_appended_to_is_told_ahead_and_nothing_is_left_behind(
    tmp_path: Path,
) -> None:
    names = [*ORIGIN, "name"]
    for fresh in (tmp_path / "speed.csv", tmp_path / "new" / "folder" / "speed.csv"):
        require_appendable(fresh, names)
        assert not fresh.parent.exists() or not list(fresh.parent.iterdir())
        append_rows(fresh, [{"name": "a"}], ORIGIN)
        before = fresh.read_bytes()
        require_appendable(fresh, names)
        require_appendable(fresh)
        assert fresh.read_bytes() == before
        with pytest.raises(InvalidOption, match="choose another file"):
            require_appendable(fresh, [*names, "other"])
        fresh.unlink()
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\x00")
    beneath_a_file = binary / "folder" / "speed.csv"
    for path, columns in ((beneath_a_file, None), (tmp_path, None), (binary, names)):
        with pytest.raises(InvalidOption, match="rows can't be written to"):
            require_appendable(path, columns)


def test_no_figure_can_hide_the_origin_of_its_row():
    figures = {"looseleaf", "transformers", "measurement", "model", "hit_ratio", "first_token_ms"}
    assert not figures & set(describe_origin())


def test_every_arm_begins_a_round_as_often_as_the_others():
    order: list[str] = []

    def arm(name: str) -> float:
        order.append(name)
        return float(len(order))

    taken = measure_in_turn({"a": lambda: arm("a"), "b": lambda: arm("b")}, 4, warm_up=0)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert taken["a"].values == (1.0, 4.0, 5.0, 8.0)
    assert taken["a"].median == 4.5
    assert taken["b"].range == (2.0, 7.0)


def test_a_row_names_its_commit_and_only_changed_code_makes_it_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    for name in ("results/speed.csv", "code/origin.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("before\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    monkeypatch.delenv("LOOSELEAF_COMMIT", raising=False)
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "code/origin.py"))
    commit = git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "results/speed.csv").write_text("before\nafter\n")
    assert describe_origin()["commit"] == commit
    (tmp_path / "code/origin.py").write_text("after\n")
    assert describe_origin()["commit"] == f"{commit}-dirty"
    monkeypatch.setenv("LOOSELEAF_COMMIT", "0123456789ab")
    assert describe_origin()["commit"] == "0123456789ab"
