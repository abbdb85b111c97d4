"""Charts of times from ``tiers.csv``, ``fuse.csv``, ``select.csv``, ``hosted.csv`` and
``attention.csv``, and tables of the last and of ``serving.csv``."""

from collections import Counter
from collections.abc import Iterator, Sequence

from looseleaf_lab.evals.report.charts import Chart
from looseleaf_lab.evals.report.rows import Row, Series, by_machine, group_series, line_series
from looseleaf_lab.evals.report.tables import Table

_USUAL_RATIO = "0.15"
_ENGINE_DEFAULT = "left to the engine"
# arms and columns of ``select.csv`` with their names in a legend and on an axis
_ARMS = {
    "select": "chosen",
    "left alone": _ENGINE_DEFAULT,
    "w=2": "w = 2",
    "w=4": "w = 4",
    "w=8": "w = 8",
}
_TIERS = ("fast", "medium", "slow", "disk", "remote", "all")
_PLACES = ("device", "host", "disk", "nowhere")
_FUSED = ("full", "prefix", "load", "reuse", "first", "random", "question", "links", "deviation")
_NUMBERS = {"context": "tokens before a row", "batch": "outputs"}


def tiers_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Per machine and model: first tokens by tier, for recomputed shares and for the controller."""
    for machine, machine_rows in by_machine(rows):
        for model in dict.fromkeys(row["model"] for row in machine_rows):
            # each share of a sweep is an arm
            model_rows = [
                row | {"arm": f"{float(row['ratio']):.0%}" if row["arm"] == "sweep" else row["arm"]}
                for row in machine_rows
                if row["model"] == model
            ]
            shares = sorted((row for row in model_rows if row["arm"].endswith("%")), key=_ratio)
            series, groups = group_series(
                model_rows,
                lambda row: row["tier"],
                lambda row: 1e3 * float(row["seconds"]),
                order=_TIERS,
                arms=["controller", *(row["arm"] for row in shares), "computed"],
            )
            title = f"First tokens by tier, {model}, {model_rows[0]['hardware']}"
            # a name such as "llama-3.1-8b, random" begins with the shape
            shape = f"_{model.partition(',')[0]}" if "," in model else ""
            yield Chart(f"tiers_{machine}{shape}", title, "ms", series, groups)


def fuse_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Per machine and size: first tokens by policy and place and by recomputed share, and times of
    successive batches."""
    for machine, machine_rows in by_machine(rows):
        for sizes in dict.fromkeys(
            (row["documents"], row["document_tokens"]) for row in machine_rows
        ):
            size_rows = [
                row for row in machine_rows if (row["documents"], row["document_tokens"]) == sizes
            ]
            machine_name = size_rows[0]["hardware"]
            label = f"{sizes[0]} documents of {sizes[1]}, {size_rows[0]['model']}, {machine_name}"
            name = f"{machine}_{sizes[0]}_{sizes[1]}"
            first = [row for row in size_rows if row["measurement"] == "first token"]
            if first:
                yield from _first_tokens(name, label, first)
            batches = [row for row in size_rows if row["measurement"].startswith("batch")]
            if batches:
                yield Chart(
                    f"fuse_batches_{name}", f"Batch after batch, {label}", "ms",
                    line_series(batches, "batch", lambda row: float(row["ms"])),
                    x_label="batch", log_y=True,
                )  # fmt: skip


def _ratio(row: Row) -> float:
    return float(row["ratio"])


def _first_tokens(name: str, label: str, first: Sequence[Row]) -> Iterator[Chart]:
    ratios = [row["ratio"] for row in first if float(row["ratio"])]
    # bars show one share: that of the papers if it was measured
    bar_ratio = _USUAL_RATIO if _USUAL_RATIO in ratios else next(iter(ratios), "")
    bars = [row for row in first if not float(row["ratio"]) or row["ratio"] == bar_ratio]
    series, groups = group_series(
        bars,
        lambda row: row["place"],
        lambda row: float(row["ms"]),
        order=_PLACES,
        arms=_FUSED,
    )
    yield Chart(f"fuse_{name}", f"First tokens, {label}", "ms", series, groups, log_y=True)
    if len({*ratios}) > 1:
        labelled = [
            row
            | {"arm": f"{row['arm']}, {row['place']}", "percent": f"{100 * float(row['ratio'])}"}
            for row in first
            if float(row["ratio"])
        ]
        # an arm with one measured share is a bar of the other chart, and no line
        measured = {(row["arm"], row["percent"]) for row in labelled}
        counts = Counter(arm for arm, _ in measured)
        labelled = [row for row in labelled if counts[row["arm"]] > 1]
        labelled.sort(key=lambda row: _FUSED.index(row["arm"].partition(", ")[0]))
        ends = sorted({float(row["percent"]) for row in labelled})
        levels = tuple(
            Series(row["arm"], (ends[0], ends[-1]), (float(row["ms"]),) * 2)
            for row in first
            if row["arm"] == "full"
        )
        yield Chart(
            f"fuse_shares_{name}", f"First tokens, {label}", "ms",
            line_series(labelled, "percent", lambda row: float(row["ms"])),
            x_label="document tokens computed again, %", points=levels, log_y=True,
        )  # fmt: skip


def select_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Per machine and policy: attention and whole tokens, by context and by batch; bytes."""
    for machine, machine_rows in by_machine(sorted(map(_with_legend_name, rows), key=_rank)):
        tokens = [row for row in machine_rows if row["what"] == "token"]
        if tokens:
            yield _bytes_chart(machine, tokens)
        for kind in dict.fromkeys(
            (row["what"], row["shape"], row["select"]) for row in machine_rows
        ):
            kind_rows = [
                row for row in machine_rows if (row["what"], row["shape"], row["select"]) == kind
            ]
            measurement, shape, select = kind
            slug = f"{machine}_{measurement}_{shape}_{select}".replace(", ", "_").replace(" ", "_")
            for x, other_column in (("context", "batch"), ("batch", "context")):
                # the other column is fixed at its most frequent value
                counts = [row[other_column] for row in kind_rows]
                most_common = max(dict.fromkeys(counts), key=counts.count)
                chart_rows = [row for row in kind_rows if row[other_column] == most_common]
                if len({row[x] for row in chart_rows}) > 1:
                    sizes = f"{other_column} {most_common}, {kind_rows[0]['hardware']}"
                    title = f"{measurement.capitalize()}, {select}, {sizes}"
                    yield Chart(
                        f"select_{slug}_{x}", title, "ms",
                        line_series(chart_rows, x, lambda row: float(row["ms"])),
                        x_label=_NUMBERS[x], log_x=True, log_y=True,
                    )  # fmt: skip


def _bytes_chart(machine: str, tokens: Sequence[Row]) -> Chart:
    """Bytes of a step by outputs and context, in ascending order."""
    policies = list(dict.fromkeys(row["select"] for row in tokens))

    def size(row: Row) -> str:
        policy = f"{row['select']}, " if len(policies) > 1 else ""
        return f"{policy}{row['batch']} × {int(row['context']):,}"

    # the engine's default reads the same bytes as one of the other arms
    rows_of_traffic = [row for row in tokens if row["arm"] != _ENGINE_DEFAULT]
    rows_of_traffic.sort(key=lambda row: (int(row["batch"]), int(row["context"])))
    series, groups = group_series(rows_of_traffic, size, lambda row: float(row["mb"]) / 1e3)
    title = f"Bytes that a step reads, counted, {', '.join(policies)}, {tokens[0]['hardware']}"
    return Chart(f"select_traffic_{machine}", title, "GB", series, groups)


def _with_legend_name(row: Row) -> Row:
    """The row with its arm's name in legends; adaptive windows are one arm at every width."""
    width = row["arm"].removeprefix("w<=").partition(" is ")[0]
    if row["arm"].startswith("w<="):
        return row | {"arm": f"w ≤ {width}, adaptive"}
    return row | {"arm": _ARMS.get(row["arm"], row["arm"])}


def _rank(row: Row) -> int:
    """The position of a row's arm in legends."""
    order = "dense", *(name for name in _ARMS.values() if name != _ENGINE_DEFAULT)
    return (
        order.index(row["arm"])
        if row["arm"] in order
        else len(order) + (row["arm"] == _ENGINE_DEFAULT)
    )


def hosted_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Per machine and depth: time per token by context and index."""
    for machine, machine_rows in by_machine(rows):
        for shape, layers in dict.fromkeys((row["shape"], row["layers"]) for row in machine_rows):
            shape_rows = [
                row for row in machine_rows if (row["shape"], row["layers"]) == (shape, layers)
            ]
            title = f"A token of {shape}, {layers} layers, {shape_rows[0]['hardware']}"
            yield Chart(
                f"hosted_{machine}_{layers}", title, "ms",
                line_series(shape_rows, "context", lambda row: float(row["token_ms"])),
                x_label="tokens of context", log_x=True, log_y=True,
            )  # fmt: skip


def frames_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Per machine: the cost of frames by case, against kernels compiled without them."""
    for machine, machine_rows in by_machine(rows):
        row_of = {(row["measurement"], row["arm"], row["commit"]): row for row in machine_rows}
        costs = {
            case: 100
            * (float(row_of[case, "looseleaf", commit]["median"]) / float(row["median"]) - 1)
            for (case, arm, commit), row in row_of.items()
            if arm == "without frames" and (case, "looseleaf", commit) in row_of
        }
        if costs:
            positions = tuple(float(n) for n in range(len(costs)))
            title = f"What frames cost, {machine_rows[0]['hardware']}"
            yield Chart(
                f"frames_{machine}", title, "% of a layer",
                (Series("frames", positions, tuple(costs.values())),), tuple(costs), sideways=True,
            )  # fmt: skip


def attention_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Microseconds of a layer: a line per case, a column per arm."""
    for _, machine_rows in by_machine(rows):
        arms = list(dict.fromkeys(row["arm"] for row in machine_rows))
        cells = {(row["measurement"], row["arm"]): row for row in machine_rows}
        yield Table(
            f"Attention of a layer, us (share of the roofline), {machine_rows[0]['hardware']}",
            ("", *arms),
            tuple(
                (case, *(_microseconds(cells.get((case, arm))) for arm in arms))
                for case in dict.fromkeys(row["measurement"] for row in machine_rows)
            ),
        )


def _microseconds(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{float(row['median']):.1f} ({float(row['share_of_roofline']):.0%})"


def serving_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Server measurements with their floors."""
    for _, machine_rows in by_machine(rows):
        yield Table(
            f"Serving, {machine_rows[0]['hardware']}",
            ("", "model", "unit", "Looseleaf", "lowest", "highest", "floor", "share of roofline"),
            tuple(
                (
                    row["measurement"],
                    row["model"],
                    row["unit"],
                    *(row[f"looseleaf{end}"] for end in ("", "_low", "_high")),
                    row["floor"],
                    row["roofline_share"],
                )
                for row in machine_rows
            ),
        )
