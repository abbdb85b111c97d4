"""The load controller: it chooses the tier of each document, and the recompute ratio of a load.

CacheBlend (arXiv 2405.16444, section 5.1) balances two times per layer, because a layer computes
while the next one loads. ``T_load`` is the load time of the documents. ``T_recompute(r)`` is the
compute time of a share r of their tokens. A ratio below their balance saves no time, so r is raised
to it. Documents load only if that is expected to be faster than computing them. Both times are
measured.

``T_load`` depends on r: long passes launch kernel by kernel, and loading threads then wait for the
interpreter. If that costs more than 5 %, r is raised only as far as passes replay."""

from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

from looseleaf.blend.fuse_budget import again, raised
from looseleaf.blend.fusion import is_exact
from looseleaf.config import Fuse
from looseleaf.engine.reports.outputs import Arrivals
from looseleaf.engine.sequence import Sequence
from looseleaf.engine.tiering.compute_time import ComputeTime, count_pairs
from looseleaf.kv.keys import SegmentKey
from looseleaf.prompt.placements import DocumentUse, TextRun
from looseleaf.tiers import Tiers

# documents that are computed instead of loaded before a slow tier is tried again
_TRY_AGAIN = 16
# a tier is tried again only if it is expected to be at most this many times slower
_NEAR = 4.0
# largest slowdown of loads that a larger budget is worth
_WORTH = 1.05


@dataclass(eq=False)
class Trials:
    """Trials of slower tiers, whose speed would otherwise never be measured again.

    A tier is tried if it is at most `_NEAR` times slower, and so rarely that trials cost a
    sixteenth of the load time."""

    _left: dict[str, int] = field(default_factory=dict)

    def choose(self, quickest: str, seconds: Mapping[str, float]) -> str:
        """The ``quickest`` tier by expected ``seconds``, or a tier whose trial is due."""
        best = seconds[quickest]
        self._left.pop(quickest, None)
        for name, expected in seconds.items() if best else ():
            if name == quickest or expected > _NEAR * best:
                continue
            self._left[name] = times = self._left.get(name, 0) + 1
            if times >= _TRY_AGAIN * max(1.0, expected / best - 1):
                del self._left[name]
                return name
        return quickest


@dataclass(eq=False)
class LoadingController:
    """The load controller of one engine, whose model has ``num_layers``.

    Passes that wait for loads replay up to ``replayed_rows`` rows; None if launches do not slow
    down loads."""

    tiers: Tiers
    compute_time: ComputeTime
    num_layers: int
    replayed_rows: int | None = None
    _passed_over: dict[str, int] = field(default_factory=dict)
    _held_back: dict[str, int] = field(default_factory=dict)
    _trials: Trials = field(default_factory=Trials)

    def choose(
        self,
        sequence: Sequence,
        uses: Rows[DocumentUse],
        holders: Mapping[SegmentKey, Rows[str]],
    ) -> dict[SegmentKey, str]:
        """The tier of each document; documents that are faster to compute are left out.

        ``holders`` are the tiers that have each document."""
        if not uses:
            return {}
        lengths = {use.key: use.num_tokens for use in uses}
        chosen = self._or_another(lengths, holders, self._places(lengths, holders))
        load = self.load_seconds(lengths, chosen)
        compute, ahead = self._encoding_seconds(uses), self._ahead_seconds(sequence, chosen)
        rows, rest = self._own_pass(sequence)
        if load is not None and not self._replays(rows):
            load *= self._slowdown(chosen.values())
        total = instead = None
        if ahead is not None and rest is not None:
            behind = None if load is None else max(0.0, load - ahead)
            total = None if behind is None else ahead + piped(behind, rest, self.num_layers)
            instead = None if compute is None else ahead + compute + rest
        if total and instead and self.passes_over(total, instead, chosen.values()):
            return {}
        sequence.arrivals = sequence.arrivals or Arrivals()
        sequence.arrivals.load_predicted = load
        sequence.arrivals.total_predicted = total if _is_foreseen(sequence) else None
        for use in uses:
            use.tier = chosen[use.key]
        return chosen

    def balance(
        self, fuse: Fuse, sequence: Sequence, holders: Mapping[SegmentKey, Rows[str]]
    ) -> tuple[Fuse, float]:
        """``fuse`` with the largest budget that computes within the load time of the documents, at
        least its own budget, and the share of tokens of that budget.

        Documents that are faster to compute have no load time. ``sequence`` blends nothing and has
        not been admitted."""
        uses = [use for use in sequence.documents if use.key in holders]
        coming = {use.key: use.num_tokens for use in uses}
        places = self._places(coming, holders)
        load = self.load_seconds(coming, places) or 0.0
        own, encoding = (
            pass_seconds(fuse, sequence, self.compute_time),
            self._encoding_seconds(uses),
        )
        if own is not None and encoding is not None and load > encoding + own:
            return afforded(fuse, sequence, 0.0, self.compute_time)
        replays = self._replays(pass_rows(fuse, sequence))
        if replays and self._holds_back(places.values()):
            return afforded(fuse, sequence, load, self.compute_time, self.replayed_rows)
        if self.replayed_rows is not None:
            load *= self._slowdown(places.values())
        return afforded(fuse, sequence, load, self.compute_time)

    def load_seconds(
        self, lengths: Mapping[SegmentKey, int], chosen: Mapping[SegmentKey, str]
    ) -> float | None:
        """The load time of documents of these lengths; tiers load in parallel. None if a tier has
        no measurement."""
        slowest = 0.0
        size = {n: self.tiers.num_bytes(n) for n in set(lengths.values())}
        for tier in set(chosen.values()):
            num_bytes = [size[n] for k, n in lengths.items() if chosen[k] == tier]
            predicted = self.tiers.predict(tier, num_bytes)
            if predicted is None:
                return None
            slowest = max(slowest, predicted)
        return slowest

    def _places(
        self, lengths: Mapping[SegmentKey, int], holders: Mapping[SegmentKey, Rows[str]]
    ) -> dict[SegmentKey, str]:
        def seconds(name: str, tokens: Rows[int]) -> float:
            # a tier without a measurement comes first, so that it is measured
            return self.tiers.predict(name, [self.tiers.num_bytes(n) for n in tokens]) or 0.0

        return places_of(lengths, holders, seconds)

    def _or_another(
        self,
        lengths: Mapping[SegmentKey, int],
        holders: Mapping[SegmentKey, Rows[str]],
        chosen: dict[SegmentKey, str],
    ) -> dict[SegmentKey, str]:
        """``chosen``, or another tier with all documents whose trial is due."""
        used, common = (
            set(chosen.values()),
            set.intersection(*(set(holders[key]) for key in lengths)),
        )
        if len(used) > 1 or not common - used:
            return chosen
        sizes = [self.tiers.num_bytes(n) for n in lengths.values()]
        seconds = {name: self.tiers.predict(name, sizes) or 0.0 for name in sorted(common)}
        return dict.fromkeys(lengths, self._trials.choose(used.pop(), seconds))

    def _encoding_seconds(self, uses: Rows[DocumentUse]) -> float | None:
        """The compute time of documents, each encoded separately."""
        rows = sum(use.num_tokens for use in uses)
        each = [(use.num_tokens, use.num_tokens + use.encoded_at) for use in uses]
        return self.compute_time.predict(rows, count_pairs(each))

    def _ahead_seconds(self, sequence: Sequence, coming: Container[SegmentKey]) -> float | None:
        """The compute time that does not wait for loads: the lead, and documents without a tier."""
        lead = sequence.lead
        each = [] if lead is None else [_left_of(lead)]
        for use in sequence.owned:
            if use.key not in coming:
                each.append((use.num_tokens, use.num_tokens + use.encoded_at))
        rows = sum(num for num, _ in each)
        return self.compute_time.predict(rows, count_pairs(each)) if rows else 0.0

    def _own_pass(self, sequence: Sequence) -> tuple[int, float | None]:
        """The sequence's rows after documents, and their compute time after the loads."""
        text = [_left_of(run) for run in sequence.runs if run is not sequence.lead]
        rows, pairs, fusion = sum(num for num, _ in text), count_pairs(text), sequence.fusion
        blends = False
        if fusion is not None:
            num_chosen, middle = fusion.expected()
            among = sum(use.num_tokens for use in fusion.documents)
            pairs += round(num_chosen * middle)
            pairs += _patch_pairs(num_chosen, among, sum(r.num_tokens for r in fusion.runs))
            rows, blends = rows + num_chosen, 0 < num_chosen < among
        return rows, self.compute_time.predict(rows, pairs, blends=blends)

    def passes_over(self, loading: float, computing: float, names: Iterable[str]) -> bool:
        """Whether documents are computed instead of loaded from tiers of these ``names``."""
        return loading > computing and not _try_again(self._passed_over, names)

    def _replays(self, rows: int) -> bool:
        return self.replayed_rows is None or rows <= self.replayed_rows

    def _slowdown(self, names: Iterable[str]) -> float:
        """The slowdown of loads beside launches, largest of the tiers ``names``; 1 if unknown."""
        return max((self.tiers.slowdown(name) or 1.0 for name in names), default=1.0)

    def _holds_back(self, names: Iterable[str]) -> bool:
        """Whether a replaying pass must stay small enough to replay, because launches slow down
        loads, or because that slowdown is unknown."""
        used = set(names)
        if any(self.tiers.slowdown(name) is None for name in used):
            return True
        return self._slowdown(used) > _WORTH and not _try_again(self._held_back, used)


def _left_of(run: TextRun) -> tuple[int, int]:
    """Uncached rows of a run, and the keys up to its end."""
    return run.num_tokens - run.computed, run.start + run.num_tokens


def _is_foreseen(sequence: Sequence) -> bool:
    """Whether the time to the first token is predictable at admission: the sequence waits for no
    document of another sequence, and needs no token scoring."""
    owned = {use.key for use in sequence.owned}
    waits = any(
        use.segment is not None and not use.segment.ready and use.key not in owned
        for use in sequence.documents
    )
    fusion = sequence.fusion
    return not waits and (fusion is None or fusion.selector.evidence == "none")


def _try_again(passed: dict[str, int], names: Iterable[str]) -> bool:
    """Whether a trial of one of ``names`` is due; also increments their counts in ``passed``."""
    due = False
    for name in dict.fromkeys(names):
        times = passed.get(name, 0) + 1
        due = due or times >= _TRY_AGAIN
        passed[name] = 0 if times >= _TRY_AGAIN else times
    return due


def places_of(
    lengths: Mapping[SegmentKey, int],
    holders: Mapping[SegmentKey, Rows[str]],
    seconds: Callable[[str, Rows[int]], float],
) -> dict[SegmentKey, str]:
    """The tier of each document of ``lengths``, by the expected ``seconds`` of a tier. ``holders``
    are the tiers that have each document.

    One tier loads all documents if it has them all, because parallel reads from several tiers slow
    each other and the model down."""

    def quickest(names: Rows[str], tokens: Rows[int]) -> str:
        return names[0] if len(names) == 1 else min(names, key=lambda n: seconds(n, tokens))

    names = dict.fromkeys(name for names in holders.values() for name in names)
    common = [name for name in names if all(name in holders[key] for key in lengths)]
    if common:
        return dict.fromkeys(lengths, quickest(common, list(lengths.values())))
    return {key: quickest(holders[key], [n]) for key, n in lengths.items()}


def afforded(
    fuse: Fuse,
    sequence: Sequence,
    seconds: float,
    compute_time: ComputeTime,
    most_rows: int | None = None,
) -> tuple[Fuse, float]:
    """``fuse`` with the largest budget that computes within ``seconds`` and ``most_rows``, together
    with the sequence's text, and its share of the candidates. At least its own budget.

    ``sequence`` blends nothing and has not been admitted."""
    lengths = [use.num_tokens for use in candidates(sequence)]

    def fits(share: float) -> bool:
        larger = raised(fuse, share, lengths)
        if most_rows is not None and pass_rows(larger, sequence) > most_rows:
            return False
        predicted = pass_seconds(larger, sequence, compute_time)
        return predicted is not None and predicted <= seconds

    # a share of 1 may be cheaper than one just below, because replaced documents are not read
    low, high = (1.0, 1.0) if fits(1.0) else (0.0, 1.0)
    while high - low > 0.002:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    settled = raised(fuse, low, lengths)
    return settled, again(settled, lengths) / max(1, sum(lengths))


def candidates(sequence: Sequence) -> Rows[DocumentUse]:
    """The documents with candidate tokens: the first one that is not exact, and all later ones."""
    uses = sequence.documents
    return uses[next((n for n, use in enumerate(uses) if not is_exact(use)), len(uses)) :]


def pass_rows(fuse: Fuse, sequence: Sequence) -> int:
    """The most rows of a sequence's text and of the tokens that ``fuse`` computes again."""
    chosen = again(fuse, [use.num_tokens for use in candidates(sequence)])
    return chosen + sum(run.num_tokens for run in sequence.runs)


def pass_seconds(fuse: Fuse, sequence: Sequence, compute_time: ComputeTime) -> float | None:
    """The compute time of a sequence's text and the tokens of ``fuse``; None if unknown."""
    uses = candidates(sequence)
    lengths = [use.num_tokens for use in uses]
    chosen, total = again(fuse, lengths), max(1, sum(lengths))
    # before the choice, tokens count with the mean position of the candidates
    middle = sum(use.num_tokens * (use.start + use.num_tokens / 2) for use in uses) / total
    text = [(run.num_tokens, run.start + run.num_tokens) for run in sequence.runs]
    behind = sum(run.num_tokens for run in sequence.runs if uses and run.start > uses[0].start)
    pairs = count_pairs(text) + round(chosen * middle) + _patch_pairs(chosen, total, behind)
    return compute_time.predict(pass_rows(fuse, sequence), pairs, blends=0 < chosen < total)


def _patch_pairs(chosen: int, candidates: int, text_rows: int) -> int:
    """Pairs that a patch of ``chosen`` tokens adds; 0 if it replaces all candidates."""
    return 0 if chosen == candidates else chosen * (chosen + 1) // 2 + chosen * text_rows


def timed(fuse: Fuse, sequence: Sequence, compute_time: ComputeTime) -> tuple[Fuse, float]:
    """A policy with a budget in seconds, as a current budget of tokens, and its share."""
    assert fuse.seconds is not None, "the budget is a time"
    nothing = {"tokens": 0} if fuse.selector == "first" else {"ratio": 0.0}
    return afforded(replace(fuse, seconds=None, **nothing), sequence, fuse.seconds, compute_time)


def piped(load: float, compute: float, num_layers: int) -> float:
    """How long it takes to load and compute layer by layer, each layer computed once it is loaded
    and the one before it is computed."""
    first, each = load / num_layers, compute / num_layers
    return first + (num_layers - 1) * max(first, each) + each
