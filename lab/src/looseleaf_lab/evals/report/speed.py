"""Charts of ``tiers.csv``, ``fuse.csv``, ``select.csv``, ``hosted.csv`` and ``attention.csv``, and
tables of the last and of ``serving.csv``: times."""

from collections import Counter
from collections.abc import Iterator, Sequence

from looseleaf_lab.evals.report.charts import Chart
from looseleaf_lab.evals.report.rows import Row, Series, by_machine, grouped, over
from looseleaf_lab.evals.report.tables import Table

_USUAL_RATIO = "0.15"
_LEFT = "left to the engine"
# arms and numbers of ``select.csv`` as a legend and an axis have them
_ARMS = {"select": "chosen", "left alone": _LEFT, "w=2": "w = 2", "w=4": "w = 4", "w=8": "w = 8"}
_TIERS = ("fast", "medium", "slow", "disk", "remote", "all")
_PLACES = ("device", "host", "disk", "nowhere")
_FUSED = ("full", "prefix", "load", "reuse", "first", "random", "question", "links", "deviation")
_NUMBERS = {"context": "tokens before a row", "batch": "outputs"}


def tiers_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each machine and model: first tokens by tier, for shares computed again, and by the
    controller."""
    for machine, every in by_machine(rows):
        for model in dict.fromkeys(row["model"] for row in every):
            # a sweep has an arm for each share
            own = [
                row | {"arm": f"{float(row['ratio']):.0%}" if row["arm"] == "sweep" else row["arm"]}
                for row in every
                if row["model"] == model
            ]
            shares = sorted((row for row in own if row["arm"].endswith("%")), key=_ratio)
            series, groups = grouped(
                own,
                lambda row: row["tier"],
                lambda row: 1e3 * float(row["seconds"]),
                order=_TIERS,
                arms=["controller", *(row["arm"] for row in shares), "computed"],
            )
            title = f"First tokens by tier, {model}, {own[0]['hardware']}"
            # a shape's name stands before "random"
            shape = f"_{model.partition(',')[0]}" if "," in model else ""
            yield Chart(f"tiers_{machine}{shape}", title, "ms", series, groups)


def fuse_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each machine and size: first tokens by policy and place, and by the share that is
    computed again; batch after batch."""
    for machine, every in by_machine(rows):
        for sizes in dict.fromkeys((row["documents"], row["document_tokens"]) for row in every):
            own = [row for row in every if (row["documents"], row["document_tokens"]) == sizes]
            where = f"{sizes[0]} documents of {sizes[1]}, {own[0]['model']}, {own[0]['hardware']}"
            name = f"{machine}_{sizes[0]}_{sizes[1]}"
            first = [row for row in own if row["measurement"] == "first token"]
            if first:
                yield from _first_tokens(name, where, first)
            batches = [row for row in own if row["measurement"].startswith("batch")]
            if batches:
                yield Chart(
                    f"fuse_batches_{name}", f"Batch after batch, {where}", "ms",
                    over(batches, "batch", lambda row: float(row["ms"])),
                    x_label="batch", log_y=True,
                )  # fmt: skip


def _ratio(row: Row) -> float:
    return float(row["ratio"])


def _first_tokens(name: str, where: str, first: Sequence[Row]) -> Iterator[Chart]:
    ratios = [row["ratio"] for row in first if float(row["ratio"])]
    # where several shares were measured the bars are of the one that the papers name
    usual = _USUAL_RATIO if _USUAL_RATIO in ratios else next(iter(ratios), "")
    bars = [row for row in first if not float(row["ratio"]) or row["ratio"] == usual]
    series, groups = grouped(
        bars,
        lambda row: row["place"],
        lambda row: float(row["ms"]),
        order=_PLACES,
        arms=_FUSED,
    )
    yield Chart(f"fuse_{name}", f"First tokens, {where}", "ms", series, groups, log_y=True)
    if len({*ratios}) > 1:
        named = [
            row
            | {"arm": f"{row['arm']}, {row['place']}", "percent": f"{100 * float(row['ratio'])}"}
            for row in first
            if float(row["ratio"])
        ]
        # an arm that was measured at one share is a bar of the other picture, and no line
        measured = {(row["arm"], row["percent"]) for row in named}
        counts = Counter(arm for arm, _ in measured)
        named = [row for row in named if counts[row["arm"]] > 1]
        named.sort(key=lambda row: _FUSED.index(row["arm"].partition(", ")[0]))
        ends = sorted({float(row["percent"]) for row in named})
        levels = tuple(
            Series(row["arm"], (ends[0], ends[-1]), (float(row["ms"]),) * 2)
            for row in first
            if row["arm"] == "full"
        )
        yield Chart(
            f"fuse_shares_{name}", f"First tokens, {where}", "ms",
            over(named, "percent", lambda row: float(row["ms"])),
            x_label="document tokens computed again, %", points=levels, log_y=True,
        )  # fmt: skip


def select_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each machine and policy: attention and whole tokens, by context and by batch; bytes."""
    for machine, every in by_machine(sorted(map(_told, rows), key=_rank)):
        tokens = [row for row in every if row["what"] == "token"]
        if tokens:
            yield _traffic(machine, tokens)
        for kind in dict.fromkeys((row["what"], row["shape"], row["select"]) for row in every):
            own = [row for row in every if (row["what"], row["shape"], row["select"]) == kind]
            what, shape, select = kind
            word = f"{machine}_{what}_{shape}_{select}".replace(", ", "_").replace(" ", "_")
            for x, fixed in (("context", "batch"), ("batch", "context")):
                # of the other number that which was measured most often
                counts = [row[fixed] for row in own]
                usual = max(dict.fromkeys(counts), key=counts.count)
                chosen = [row for row in own if row[fixed] == usual]
                if len({row[x] for row in chosen}) > 1:
                    title = f"{what.capitalize()}, {select}, {fixed} {usual}, {own[0]['hardware']}"
                    yield Chart(
                        f"select_{word}_{x}", title, "ms",
                        over(chosen, x, lambda row: float(row["ms"])),
                        x_label=_NUMBERS[x], log_x=True, log_y=True,
                    )  # fmt: skip


def _traffic(machine: str, tokens: Sequence[Row]) -> Chart:
    """Bytes of a step by outputs and tokens before each, from few to many."""
    policies = list(dict.fromkeys(row["select"] for row in tokens))

    def size(row: Row) -> str:
        policy = f"{row['select']}, " if len(policies) > 1 else ""
        return f"{policy}{row['batch']} × {int(row['context']):,}"

    # a choice that is left to the engine reads what one of the others reads
    own = [row for row in tokens if row["arm"] != _LEFT]
    own.sort(key=lambda row: (int(row["batch"]), int(row["context"])))
    series, groups = grouped(own, size, lambda row: float(row["mb"]) / 1e3)
    title = f"Bytes that a step reads, counted, {', '.join(policies)}, {tokens[0]['hardware']}"
    return Chart(f"select_traffic_{machine}", title, "GB", series, groups)


def _told(row: Row) -> Row:
    """A row with its arm as a legend has it: an adaptive window is one arm, however wide it is."""
    width = row["arm"].removeprefix("w<=").partition(" is ")[0]
    if row["arm"].startswith("w<="):
        return row | {"arm": f"w ≤ {width}, adaptive"}
    return row | {"arm": _ARMS.get(row["arm"], row["arm"])}


def _rank(row: Row) -> int:
    """Where a row's arm stands in a legend."""
    known = "dense", *(name for name in _ARMS.values() if name != _LEFT)
    return known.index(row["arm"]) if row["arm"] in known else len(known) + (row["arm"] == _LEFT)


def hosted_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each machine and depth: what a token takes by context, and its searches."""
    for machine, every in by_machine(rows):
        for shape, layers in dict.fromkeys((row["shape"], row["layers"]) for row in every):
            own = [row for row in every if (row["shape"], row["layers"]) == (shape, layers)]
            title = f"A token of {shape}, {layers} layers, {own[0]['hardware']}"
            yield Chart(
                f"hosted_{machine}_{layers}", title, "ms",
                over(own, "context", lambda row: float(row["token_ms"])),
                x_label="tokens of context", log_x=True, log_y=True,
            )  # fmt: skip


def frames_charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each machine: what frames cost, case by case, against kernels compiled without them."""
    for machine, own in by_machine(rows):
        taken = {(row["measurement"], row["arm"], row["commit"]): row for row in own}
        costs = {
            case: 100
            * (float(taken[case, "looseleaf", commit]["median"]) / float(row["median"]) - 1)
            for (case, arm, commit), row in taken.items()
            if arm == "without frames" and (case, "looseleaf", commit) in taken
        }
        if costs:
            places = tuple(float(n) for n in range(len(costs)))
            yield Chart(
                f"frames_{machine}", f"What frames cost, {own[0]['hardware']}", "% of a layer",
                (Series("frames", places, tuple(costs.values())),), tuple(costs), sideways=True,
            )  # fmt: skip


def attention_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """Microseconds of a layer: a line for each case, a column for each arm."""
    for _, own in by_machine(rows):
        arms = list(dict.fromkeys(row["arm"] for row in own))
        cells = {(row["measurement"], row["arm"]): row for row in own}
        yield Table(
            f"Attention of a layer, us (share of the roofline), {own[0]['hardware']}",
            ("", *arms),
            tuple(
                (case, *(_microseconds(cells.get((case, arm))) for arm in arms))
                for case in dict.fromkeys(row["measurement"] for row in own)
            ),
        )


def _microseconds(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{float(row['median']):.1f} ({float(row['share_of_roofline']):.0%})"


def serving_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """What a server does beside the least that it could take."""
    for _, own in by_machine(rows):
        yield Table(
            f"Serving, {own[0]['hardware']}",
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
                for row in own
            ),
        )
