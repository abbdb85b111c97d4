"""The loading controller: from where a document comes, and how much is computed again meanwhile.

CacheBlend (arXiv 2405.16444, section 5.1) balances two times, per layer, since a layer is computed
while the next one loads: ``T_load``, what a tier takes for the documents, and ``T_recompute(r)``,
what the model takes for a share r of their tokens. A smaller r than where they are equal saves
nothing, so r is raised to it; a tier is worth asking if loading from it is quicker than computing
the documents. Both times are measured, none is assumed.

``T_load`` is not the same for every r: passes of few rows are replayed, those of more are launched
kernel by kernel, and threads that load wait for the interpreter then. Where that costs more than a
twentieth, r is raised as far as passes replay."""

from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

from looseleaf.blend import Budget
from looseleaf.blend.fusion import is_exact
from looseleaf.config import Fuse
from looseleaf.engine.reports.load_report import Arrivals
from looseleaf.engine.sequence import Sequence
from looseleaf.engine.tiering.compute_time import ComputeTime, count_pairs
from looseleaf.kv.keys import SegmentKey
from looseleaf.prompt.placements import DocumentUse, TextRun
from looseleaf.tiers import Tiers

# a tier that is too slow is tried again after so many documents were computed instead
_TRY_AGAIN = 16
# and one that is left for a quicker one if it is expected to take at most so many times as long
_NEAR = 4.0
# so many times as long may loads take for a larger budget
_WORTH = 1.05


@dataclass(eq=False)
class Trials:
    """Of a tier that is always left for another nothing new would be heard, so each is tried now
    and then: if it is expected to take at most `_NEAR` times as long, and so seldom that what is
    lost by it is a sixteenth of what loads take."""

    _left: dict[str, int] = field(default_factory=dict)

    def choose(self, quickest: str, seconds: Mapping[str, float]) -> str:
        """The ``quickest`` of tiers that are expected to take so many ``seconds``, or one that is
        to be tried."""
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
    """Decides for one engine, whose model has ``num_layers``, and whose passes behind loads replay
    up to so many rows; ``replayed_rows`` is None where launching a pass takes nothing from
    loads."""

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
        found: Mapping[SegmentKey, Rows[str]],
    ) -> dict[SegmentKey, str]:
        """The tier that each document comes from; one that is quicker to compute is left out."""
        if not uses:
            return {}
        lengths = {use.key: use.num_tokens for use in uses}
        chosen = self._or_another(lengths, found, self._places(lengths, found))
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
        self, fuse: Fuse, sequence: Sequence, found: Mapping[SegmentKey, Rows[str]]
    ) -> tuple[Fuse, float]:
        """``fuse`` with the largest budget whose tokens can be computed again in the time that the
        documents take to load, or its own if that is larger; and the share of tokens that this is.

        Documents that are computed sooner than loaded take no time to load. ``sequence`` blends
        nothing and has not been admitted."""
        uses = [use for use in sequence.documents if use.key in found]
        coming = {use.key: use.num_tokens for use in uses}
        places = self._places(coming, found)
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
        """How long documents of these lengths take to load, each from its tier; tiers load side by
        side. None if nothing is known of one."""
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
        self, lengths: Mapping[SegmentKey, int], found: Mapping[SegmentKey, Rows[str]]
    ) -> dict[SegmentKey, str]:
        def seconds(name: str, tokens: Rows[int]) -> float:
            # one of which nothing is known comes first, for it to be known
            return self.tiers.predict(name, [self.tiers.num_bytes(n) for n in tokens]) or 0.0

        return places_of(lengths, found, seconds)

    def _or_another(
        self,
        lengths: Mapping[SegmentKey, int],
        found: Mapping[SegmentKey, Rows[str]],
        chosen: dict[SegmentKey, str],
    ) -> dict[SegmentKey, str]:
        """``chosen``, or another tier that has all of the documents too and is to be tried."""
        used, common = set(chosen.values()), set.intersection(*(set(found[key]) for key in lengths))
        if len(used) > 1 or not common - used:
            return chosen
        sizes = [self.tiers.num_bytes(n) for n in lengths.values()]
        seconds = {name: self.tiers.predict(name, sizes) or 0.0 for name in sorted(common)}
        return dict.fromkeys(lengths, self._trials.choose(used.pop(), seconds))

    def _encoding_seconds(self, uses: Rows[DocumentUse]) -> float | None:
        """How long it takes to compute documents, each by itself."""
        rows = sum(use.num_tokens for use in uses)
        each = [(use.num_tokens, use.num_tokens + use.part.context_length) for use in uses]
        return self.compute_time.predict(rows, count_pairs(each))

    def _ahead_seconds(self, sequence: Sequence, coming: Container[SegmentKey]) -> float | None:
        """How long it takes to compute what does not wait for documents that are ``coming``: the
        text before the first, and documents that no tier has."""
        lead = sequence.lead
        each = [] if lead is None else [_left_of(lead)]
        for use in sequence.owned:
            if use.key not in coming:
                each.append((use.num_tokens, use.num_tokens + use.part.context_length))
        rows = sum(num for num, _ in each)
        return self.compute_time.predict(rows, count_pairs(each)) if rows else 0.0

    def _own_pass(self, sequence: Sequence) -> tuple[int, float | None]:
        """The sequence's rows behind documents, and how long they take once these are there."""
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
        """Whether documents are computed though tiers of these ``names`` have them, by what either
        is expected to take."""
        return loading > computing and not _try_again(self._passed_over, names)

    def _replays(self, rows: int) -> bool:
        return self.replayed_rows is None or rows <= self.replayed_rows

    def _slowdown(self, names: Iterable[str]) -> float:
        """How many times as long loads from tiers of these ``names`` take beside launches, as far
        as is known."""
        return max((self.tiers.slowdown(name) or 1.0 for name in names), default=1.0)

    def _holds_back(self, names: Iterable[str]) -> bool:
        """Whether a pass that replays stays one that does: loads beside others take longer, or
        nobody knows yet how long those beside this one take."""
        used = set(names)
        if any(self.tiers.slowdown(name) is None for name in used):
            return True
        return self._slowdown(used) > _WORTH and not _try_again(self._held_back, used)


def _left_of(run: TextRun) -> tuple[int, int]:
    """Rows of a run that no cache has, and the keys up to its end."""
    return run.num_tokens - run.computed, run.start + run.num_tokens


def _is_foreseen(sequence: Sequence) -> bool:
    """Whether what a sequence does until its first token is known when it is admitted: it waits for
    no other's documents, and chooses tokens without passes that look for them."""
    owned = {use.key for use in sequence.owned}
    waits = any(
        use.segment is not None and not use.segment.ready and use.key not in owned
        for use in sequence.documents
    )
    fusion = sequence.fusion
    return not waits and (fusion is None or fusion.selector.evidence == "none")


def _try_again(passed: dict[str, int], names: Iterable[str]) -> bool:
    """Whether one of ``names`` was ``passed`` over so often that it is to be tried again; counts
    that once more."""
    again = False
    for name in dict.fromkeys(names):
        times = passed.get(name, 0) + 1
        again = again or times >= _TRY_AGAIN
        passed[name] = 0 if times >= _TRY_AGAIN else times
    return again


def places_of(
    lengths: Mapping[SegmentKey, int],
    found: Mapping[SegmentKey, Rows[str]],
    seconds: Callable[[str, Rows[int]], float],
) -> dict[SegmentKey, str]:
    """The tier for each document of ``lengths``, by the expected ``seconds`` of a tier for some.

    One tier for all of them, if one has them all: threads that read from several places at once are
    in each other's way, and in the model's."""

    def quickest(names: Rows[str], tokens: Rows[int]) -> str:
        return names[0] if len(names) == 1 else min(names, key=lambda n: seconds(n, tokens))

    names = dict.fromkeys(name for names in found.values() for name in names)
    common = [name for name in names if all(name in found[key] for key in lengths)]
    if common:
        return dict.fromkeys(lengths, quickest(common, list(lengths.values())))
    return {key: quickest(found[key], [n]) for key, n in lengths.items()}


def afforded(
    fuse: Fuse,
    sequence: Sequence,
    seconds: float,
    compute_time: ComputeTime,
    most_rows: int | None = None,
) -> tuple[Fuse, float]:
    """``fuse`` with the largest budget whose tokens, and the sequence's text, can be computed in so
    many seconds and are ``most_rows``, or its own if that is larger; and the share of tokens that
    this is, of those that it may choose from.

    ``sequence`` blends nothing and has not been admitted."""
    lengths = [use.num_tokens for use in candidates(sequence)]

    def fits(share: float) -> bool:
        larger = raised(fuse, share, lengths)
        if most_rows is not None and pass_rows(larger, sequence) > most_rows:
            return False
        predicted = pass_seconds(larger, sequence, compute_time)
        return predicted is not None and predicted <= seconds

    # of what is replaced as a whole nothing is read: all may be cheaper than nearly all
    low, high = (1.0, 1.0) if fits(1.0) else (0.0, 1.0)
    while high - low > 0.002:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    settled = raised(fuse, low, lengths)
    return settled, again(settled, lengths) / max(1, sum(lengths))


def candidates(sequence: Sequence) -> Rows[DocumentUse]:
    """The documents whose tokens a policy may choose: all behind the first one that does not stand
    directly behind what it was encoded behind."""
    uses = sequence.documents
    return uses[next((n for n, use in enumerate(uses) if not is_exact(use)), len(uses)) :]


def pass_rows(fuse: Fuse, sequence: Sequence) -> int:
    """Rows of a sequence's text and of the tokens that ``fuse`` computes again, at most."""
    chosen = again(fuse, [use.num_tokens for use in candidates(sequence)])
    return chosen + sum(run.num_tokens for run in sequence.runs)


def pass_seconds(fuse: Fuse, sequence: Sequence, compute_time: ComputeTime) -> float | None:
    """How long a sequence's text takes with the tokens that ``fuse`` computes again; None if that
    is not known. It blends nothing yet."""
    uses = candidates(sequence)
    lengths = [use.num_tokens for use in uses]
    chosen, total = again(fuse, lengths), max(1, sum(lengths))
    # which tokens these will be is not known: they read what those in the middle read
    middle = sum(use.num_tokens * (use.start + use.num_tokens / 2) for use in uses) / total
    text = [(run.num_tokens, run.start + run.num_tokens) for run in sequence.runs]
    behind = sum(run.num_tokens for run in sequence.runs if uses and run.start > uses[0].start)
    pairs = count_pairs(text) + round(chosen * middle) + _patch_pairs(chosen, total, behind)
    return compute_time.predict(pass_rows(fuse, sequence), pairs, blends=0 < chosen < total)


def _patch_pairs(chosen: int, candidates: int, text_rows: int) -> int:
    """Pairs that a patch of so many ``chosen`` tokens adds: what it replaces is passed over, but
    for documents that are replaced as a whole."""
    return 0 if chosen == candidates else chosen * (chosen + 1) // 2 + chosen * text_rows


def timed(fuse: Fuse, sequence: Sequence, compute_time: ComputeTime) -> tuple[Fuse, float]:
    """A policy whose budget is a time, with the budget that this is now; and its share."""
    assert fuse.seconds is not None, "the budget is a time"
    nothing = {"tokens": 0} if fuse.selector == "first" else {"ratio": 0.0}
    return afforded(replace(fuse, seconds=None, **nothing), sequence, fuse.seconds, compute_time)


def raised(fuse: Fuse, share: float, lengths: Rows[int]) -> Fuse:
    """``fuse`` with a budget of ``share`` of documents of these lengths, if that is more than its
    own: a ratio, or so many first tokens of each."""
    if fuse.ratio is not None:
        return replace(fuse, ratio=max(fuse.ratio, share))
    total, given = sum(lengths), fuse.tokens or 0
    wanted = share * total
    if fuse.selector != "first":
        return replace(fuse, tokens=max(given, int(wanted)))
    # documents shorter than the budget give what they have
    low, high = given, max([given, *lengths])
    while low < high:
        middle = (low + high + 1) // 2
        enough = sum(min(middle, n) for n in lengths) <= wanted
        low, high = (middle, high) if enough else (low, middle - 1)
    return replace(fuse, tokens=low)


def again(fuse: Fuse, lengths: Rows[int]) -> int:
    """How many tokens of documents of these lengths a policy computes again, at most."""
    if fuse.ratio is not None:
        return Budget(ratio=fuse.ratio).count(sum(lengths))
    tokens = fuse.tokens or 0
    if fuse.selector == "first":
        return sum(min(tokens, n) for n in lengths)
    return min(tokens, sum(lengths))


def piped(load: float, compute: float, num_layers: int) -> float:
    """How long it takes to load and compute layer by layer, each layer computed once it is loaded
    and the one before it is computed."""
    first, each = load / num_layers, compute / num_layers
    return first + (num_layers - 1) * max(first, each) + each
