"""The report of a GPU runs every part it can, within its time, and says what did not go well."""

import sys
from pathlib import Path

import pytest

from tools import draw_claims, gpu_report
from tools.gpu_report import (
    BENCHMARKS,
    Benchmark,
    Outcome,
    Part,
    benchmark_part,
    figures,
    find_command,
    main,
    parts,
    report,
    run,
)

ROOT = Path(__file__).parents[1]


def part(name: str, code: str, seconds: float = 20.0) -> Part:
    return Part(name, (sys.executable, "-c", code), seconds)


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [
        part("broken", "print('so far'); raise SystemExit(3)"),
        part("hanging", "print('here', flush=True)\nwhile True: pass", 0.5),
        Part("absent", (), 0.0, "not on PATH"),
        part("good", "print('fine')"),
    ]
    monkeypatch.setattr(gpu_report, "parts", lambda *rest: made)
    assert main(["--out", str(tmp_path), "--minutes", "2"]) == 1
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    states = {w[0]: " ".join(w[1:3]) for w in words if w and w[0] in {p.name for p in made}}
    assert states["broken"].startswith("failed")
    assert states["hanging"] == "too slow"
    assert states["absent"].startswith("missing")
    assert states["good"].startswith("ok")
    assert (tmp_path / "hanging.log").read_text().startswith("here\n")
    # what is missing is no failure, and a part can be run alone
    assert main(["--out", str(tmp_path), "--only", "good,absent"]) == 0
    assert main(["--out", str(tmp_path), "--only", "broken"]) == 1


def test_nothing_begins_when_the_time_is_over(tmp_path: Path) -> None:
    outcome = run(part("late", "print('begun')"), tmp_path, 1.0)
    assert outcome.state == "not run"
    assert outcome.is_bad
    assert not (tmp_path / "late.log").exists()


def test_an_unknown_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--only", "speed"])
    assert "there are tests, costs, memcheck, attention" in capsys.readouterr().err


def test_commands_get_the_options_that_they_have(tmp_path: Path) -> None:
    named = {one.name: one for one in parts("cpu", tmp_path, tiny=True)}
    attention = named["attention"].command
    assert attention[1:5] == ("-m", "looseleaf", "bench", "attention")
    assert attention[attention.index("--device") + 1] == "cpu"
    assert attention[attention.index("--output") + 1] == str(tmp_path / "attention.csv")
    assert attention[attention.index("--longest") + 1] == "128"


def test_rows_stand_in_the_report_and_the_table_of_parts_last(tmp_path: Path) -> None:
    (tmp_path / "attention.csv").write_text(
        "measurement,arm,unit,median,floor,share_of_roofline\n"
        "decode,looseleaf,us a layer,12.5,10,0.8\n"
        "decode,ungrouped,us a layer,25,10,0.4\n"
    )
    rows = tmp_path / "attention.csv"
    lines = report([Outcome("attention", "ok", 3.0, "done")], [rows, rows])
    assert len(lines) == 3
    assert lines[0] == "attention: decode: 12.5 us a layer (0.8); ungrouped x2.000"
    assert lines[-1].split()[:3] == ["attention", "ok", "3.0"]


def test_a_part_is_asked_to_end_before_it_is_ended_and_the_report_says_how_to_go_on(
    tmp_path: Path,
) -> None:
    code = (
        "try:\n  print('begun', flush=True)\n  while True: pass\n"
        "except KeyboardInterrupt: print('kept')"
    )
    outcome = run(part("long", code, 3.0), tmp_path, 60.0)
    assert (outcome.state, outcome.last_line) == ("too slow", "kept")
    late = Outcome("late", "not run", 0.0, "")
    assert report([outcome, late], [])[-1] == "left to run: make gpu-report ONLY=long,late"


@pytest.mark.parametrize("one", BENCHMARKS, ids=lambda one: str(one.name))
def test_every_part_is_a_command_with_the_flags_that_it_has(one: Benchmark, tmp_path: Path) -> None:
    for tiny in (False, True):
        if not (command := benchmark_part(one, "cpu", tmp_path, tiny).command):
            continue
        # parsed as it is called, never run
        _, _, cli, *words = command
        assert cli == "looseleaf"
        called, rest = find_command(words)
        called.make_context(one.name, rest)


def test_claims_are_all_parts_that_measure_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_report, "run", lambda one, *rest: Outcome(one.name, "ok", 0.0, ""))
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--only", "claims,serving"]
    assert main(arguments) == 0
    ran = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert ran == ["serving", *(one.name for one in BENCHMARKS if one.claim)]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "results").glob("*.csv")), ids=lambda p: str(p.stem)
)
def test_rows_of_every_command_can_be_shown(path: Path) -> None:
    assert 0 < len(figures(path)) <= 60


def test_rows_of_a_card_are_added_to_those_there_and_pictures_drawn_again(tmp_path: Path) -> None:
    results, images, card = (tmp_path / name for name in ("results", "images", "card"))
    for folder in (results, images, card):
        folder.mkdir()
    hits = (ROOT / "results" / "hits.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    (results / "hits.csv").write_text("".join(hits[:10]), encoding="utf-8")
    (card / "hits.csv").write_text("".join([hits[0], *hits[10:]]), encoding="utf-8")
    assert draw_claims.add_rows(card, results) == [results / "hits.csv"]
    both = (results / "hits.csv").read_text(encoding="utf-8")
    assert both.splitlines() == "".join(hits).splitlines()
    (images / "hits.svg").touch()
    assert draw_claims.draw(results, images) == [images / "hits.svg"]
    assert [path.name for path in images.iterdir()] == ["hits.svg"]
    assert (images / "hits.svg").stat().st_size > 1000
