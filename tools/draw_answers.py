"""Draws docs/answers.png, docs/answers_gpu.png and the tables of docs/answers.md from
results/answers.csv.

The rows are those of ``looseleaf eval file --measure`` and ``looseleaf calibrate --save``; the
latest row of an arm counts.

python -m tools.draw_answers"""

import csv
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "answers.md"
PART_NAMES = {"all": "questions", "develop": "even questions", "decide": "odd questions"}
DRAWN = ("all", "develop")
DRAWN_QUESTIONS = 5
"""Fewest questions of a panel."""
MARKS = re.compile(r"(?s)(<!-- (\w+) -->\n).*?(<!-- end of \2 -->)")
SUMMARY = (
    "| model | file | questions | KL of reuse | question | deviation | primer | primer, first | "
    "primer, question | primer, deviation |"
)
POLICIES = (
    "| model | odd questions | policy | computed again | even questions: KL removed | "
    "odd questions: KL removed | same first 12 tokens | sooner | ceiling of the share |"
)
HEADER = (
    "| arm | computed again | loss minus full's | KL | KL removed | same first 12 tokens | F1 | "
    "same choice | first token, s | sooner |"
)
COMPUTED = {"none": "—", "full": "100%", "prefix": "all but the first"}
"""Shares of document tokens computed for a prompt, where passages are text."""
DEVIATION = re.compile(r"deviation, layer (\d+), 0\.15")
Row = Mapping[str, str]
Group = tuple[str, str, str, str, int]
COLUMNS_OF_TIME, COLUMNS_OF_SHARE = 3, 2
LEGEND = 1.7
"""Height of the legend, in inches."""
EARLY_LAYER = 2
EXACT = ("full", "prefix")
STYLES = {
    "full": ("black", "*"),
    "prefix": ("gray", "*"),
    "reuse": ("tab:orange", "s"),
    "alone": ("tab:purple", "v"),
    "ape": ("tab:brown", "<"),
    "first": ("tab:pink", ">"),
    "question": ("tab:red", "D"),
    "deviation": ("yellowgreen", "^"),
    "deviation, a later layer": ("darkgreen", "^"),
    "question, every layer": ("maroon", "D"),
    "links": ("tab:blue", "o"),
    "links, every layer": ("navy", "o"),
    "ceiling deviation": ("yellowgreen", "x"),
    "ceiling read": ("tab:cyan", "x"),
    "ceiling received": ("darkviolet", "x"),
}
"""Color and mark of each kind of arm; another kind has `OTHER`."""
OTHER = ("dimgray", "P")


def read_groups(path: Path) -> dict[Group, list[Row]]:
    """The latest row of every arm, by model, file, part, hardware and number of questions. Rows of
    an earlier commit than a group's latest are left out: their times do not compare."""
    latest: dict[Group, dict[str, Row]] = defaultdict(dict)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            names = row["model"], row["file"], row["part"], row["hardware"]
            arms = latest[*names, int(row["questions"])]
            if arms and next(iter(arms.values()))["commit"] != row["commit"]:
                arms.clear()
            arms[row["arm"]] = row
    return {group: [*latest[group].values()] for group in sorted(latest)}


def summary(path: Path) -> str:
    """The KL that policies remove with 15 % of the tokens, a line per model and file of a GPU."""
    lines = [SUMMARY, rule_of(SUMMARY)]
    for (model, file, _, _, questions), rows in read_groups(path).items():
        by_arm = {row["arm"]: row for row in rows}
        if "ape" not in by_arm or not rows[0]["device"].startswith("cuda"):
            continue
        deviation = max(filter(DEVIATION.fullmatch, by_arm), key=layer_of)
        arms = ["question, 0.15", deviation, "primer", "primer, first, 0.15"]
        arms += ["primer, question, 0.15", f"primer, {deviation}"]
        shares = [format(float(by_arm[arm]["kl_removed"]), ".0%") for arm in arms]
        most = max(shares, key=lambda text: int(text[:-1]))
        cells = [f"**{text}**" if text == most else text for text in shares]
        reuse = format(float(by_arm["reuse"]["kl"]), ".2f")
        lines.append(f"| {' | '.join([model, file, str(questions), reuse, *cells])} |")
    return "\n".join([*lines, ""])


def policies(path: Path) -> str:
    """The policies that a calibration chose on even questions, measured on odd ones."""
    groups, lines = read_groups(path), [POLICIES, rule_of(POLICIES)]
    for (model, file, part, hardware, questions), rows in groups.items():
        if " " not in file or part != "decide":
            continue
        row = rows[-1]
        developed = {
            member["arm"]: member
            for (name, files, kind, machine, _), members in groups.items()
            if (name, files, kind, machine) == (model, file, "develop", hardware)
            for member in members
        }
        share = row["arm"].rpartition(", ")[2]
        ceilings = [
            float(member["kl_removed"])
            for arm, member in developed.items()
            if arm.startswith("ceiling") and arm.endswith(f", {share}")
        ]
        cells = (
            model,
            str(questions),
            row["arm"],
            f"{float(row['recomputed']):.0%}",
            interval(developed[row["arm"]], "kl_removed", ".0%"),
            interval(row, "kl_removed", ".0%"),
            f"{float(row['agreement']):.0%}",
            f"{float(row['sooner']):.1f} ×",
            f"{max(ceilings):.0%}" if ceilings else "—",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def rule_of(header: str) -> str:
    """The line below the header of a table."""
    return "|---|" + "---|" * (header.count("|") - 2)


def layer_of(arm: str) -> int:
    """The layer of a deviation's arm."""
    match = DEVIATION.fullmatch(arm)
    assert match, arm
    return int(match[1])


def board(path: Path) -> str:
    """The tables of the page, one per model, file, part and machine."""
    texts = []
    for (model, file, part, hardware, questions), rows in read_groups(path).items():
        tokens = max(float(row["tokens"]) for row in rows)
        title = (
            f"### {model}, {_files(file)}, {questions} {PART_NAMES[part]}, "
            f"{_machine(hardware)}\n\n{tokens:.0f} document tokens on average.\n"
        )
        lines = [HEADER, rule_of(HEADER)]
        lines += [_line(row) for row in rows]
        texts.append("\n".join([title, *lines, ""]))
    return "\n".join(texts)


def _files(file: str) -> str:
    return file.replace(" ", " + ")


def _machine(hardware: str) -> str:
    return re.sub(r"\b1 threads\b", "1 thread", hardware)


def interval(row: Row, name: str, form: str) -> str:
    """A figure with its 95 % interval."""
    value, low, high = (format(float(row[name + end]), form) for end in ("", "_low", "_high"))
    return f"{value} [{low}, {high}]"


def _line(row: Row) -> str:
    def number(name: str, form: str) -> str:
        return format(float(row[name]), form)

    choice = number("same_choice", ".0%") if row["same_choice"] else "—"
    cells = (
        row["arm"],
        COMPUTED.get(row["arm"], number("recomputed", ".0%")),
        interval(row, "nll", "+.2f"),
        interval(row, "kl", ".3f"),
        interval(row, "kl_removed", ".0%"),
        number("agreement", ".0%"),
        number("f1", ".2f"),
        choice,
        number("first_token", ".3f"),
        f"{number('sooner', '.2f')} ×",
    )
    return f"| {' | '.join(cells)} |"


TABLES = {"summary": summary, "policies": policies, "board": board}
"""The tables of the page, by the name of their mark."""


def filled(page: str, path: Path) -> str:
    """The page with its tables drawn anew."""
    return MARKS.sub(lambda mark: mark[1] + TABLES[mark[2]](path) + mark[3], page)


def family_of(arm: str) -> str:
    """An arm without its share: ``deviation, layer 2`` of ``deviation, layer 2, 0.15``."""
    name, _, share = arm.rpartition(", ")
    return name if name and share.replace(".", "").isdigit() else arm


def style_of(family: str) -> tuple[str, str, str, bool]:
    """Label, color and mark of a family, and whether it reads passages behind a primer."""
    behind = family.startswith("primer")
    arm = "reuse" if family == "primer" else family.removeprefix("primer, ")
    arm = arm.replace(", last 100% of layers", ", every layer")
    name, _, layer = arm.partition(", layer ")
    if layer and int(layer) > EARLY_LAYER:
        name = "deviation, a later layer"
    color, mark = STYLES.get(name, OTHER)
    return name, color, mark, behind


def draw(path: Path, target: Path, *, on_gpu: bool) -> None:
    """A panel per model, file and machine: KL against first-token time on a CPU, and against the
    share of tokens computed again on a GPU, where other processes shared the cards.

    Lines join shares of a policy. ``none`` is not drawn: it is several times as far from full
    prefill as any other arm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = drawn_groups(read_groups(path), on_gpu=on_gpu)
    columns = COLUMNS_OF_SHARE if on_gpu else COLUMNS_OF_TIME
    lines = -(-len(groups) // columns)
    size = (5.2 * columns, 3.6 * lines + LEGEND)
    figure, panels = pyplot.subplots(lines, columns, figsize=size, squeeze=False)
    labels: dict[str, Any] = {}
    for axes in panels.flat[len(groups) :]:
        axes.set_axis_off()
    for axes, (group, rows) in zip(panels.flat, groups.items(), strict=False):
        model, file, part, machine, questions = group
        hidden = ("none", "prefix") if on_gpu else ("none",)
        shown = [row for row in rows if row["arm"] not in hidden]
        labels |= _panel(axes, shown, "recomputed" if on_gpu else "first_token")
        (_share_axis if on_gpu else _time_axis)(axes)
        title = f"{model}\n{_files(file)}; {questions} {PART_NAMES[part]}\n{_machine(machine)}"
        axes.set_title(title, loc="left", fontsize=9)
    for axes in panels[:, 0]:
        axes.set_ylabel("KL from full prefill, nats a token")
    figure.legend(labels.values(), labels.keys(), loc="lower center", ncols=columns + 1, fontsize=9)
    figure.tight_layout(rect=(0, LEGEND / size[1], 1, 1))
    figure.savefig(target, dpi=80, metadata={"Software": None})


def drawn_groups(groups: Mapping[Group, list[Row]], *, on_gpu: bool) -> dict[Group, list[Row]]:
    """The groups of a picture, those of several files first. Even questions are left out where
    all questions of the same run are drawn, and so are groups of few questions. On a GPU a group
    has several shares."""
    chosen = {}
    for group in sorted(groups, key=lambda group: (" " not in group[1], group)):
        model, file, part, machine, questions = group
        whole = (model, file, "all", machine, 2 * questions)
        is_kind = groups[group][0]["device"].startswith("cuda") == on_gpu
        shares = {round(float(row["recomputed"]), 1) for row in groups[group]} - {0.0}
        is_kind = is_kind and (len(shares) > 1 or not on_gpu)
        if is_kind and part in DRAWN and whole not in groups and questions >= DRAWN_QUESTIONS:
            chosen[group] = groups[group]
    return chosen


def _panel(axes: Any, rows: Sequence[Row], along: str) -> dict[str, Any]:
    """Draws KL along a column; returns the drawn arms by their labels."""
    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        families[family_of(row["arm"])].append(row)
    drawn = {}
    for family, members in families.items():
        points = sorted(members, key=lambda row: float(row["recomputed"]))
        places = [1.0 if row["arm"] == "full" else float(row["recomputed"]) for row in points]
        if along != "recomputed":
            places = [float(row[along]) for row in points]
        kl, low, high = (
            [float(row[name]) for row in points] for name in ("kl", "kl_low", "kl_high")
        )
        bars = [
            [max(0.0, k - b) for k, b in zip(kl, low, strict=True)],
            [max(0.0, t - k) for k, t in zip(kl, high, strict=True)],
        ]
        name, color, mark, behind = style_of(family)
        form = {"marker": mark, "color": color, "capsize": 2, "linewidth": 1, "elinewidth": 0.6}
        filling = color if behind or name in EXACT else "white"
        line = axes.errorbar(places, kl, yerr=bars, markerfacecolor=filling, **form)
        drawn[f"{name}, behind a primer" if behind else name] = line
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    return drawn


def _share_axis(axes: Any) -> None:
    axes.set_xlabel("share of the document tokens that is computed again")
    axes.xaxis.set_major_formatter("{x:.0%}")


def _time_axis(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("time of the first token, s")


if __name__ == "__main__":
    data = ROOT / "results" / "answers.csv"
    draw(data, ROOT / "docs" / "answers.png", on_gpu=False)
    draw(data, ROOT / "docs" / "answers_gpu.png", on_gpu=True)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(page, data), encoding="utf-8")
