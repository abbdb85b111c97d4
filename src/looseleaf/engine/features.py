"""The features of a request: hooks that its sequences call in steps. A plain request has none."""

from collections.abc import Iterator
from dataclasses import dataclass

from looseleaf.attention.paged import PagedAttention
from looseleaf.attention.plan.groups import DecodeRow
from looseleaf.attention.select.policy import PagePolicy, SelectingRow
from looseleaf.blend.ape import ApeRows
from looseleaf.config import EngineConfig, Select
from looseleaf.engine.runner.eviction import Evictions
from looseleaf.engine.runner.runner import Runner
from looseleaf.engine.sequence import Sequence
from looseleaf.errors import InvalidRequest
from looseleaf.prompt.feature import Feature, FeatureSequence
from looseleaf.prompt.request import Request
from looseleaf.retro.revisions import Revisions


@dataclass(frozen=True)
class Features:
    """Makes the features of sequences, for one engine."""

    attention: PagedAttention
    revisions: Revisions
    evictions: Evictions

    @classmethod
    def create(cls, runner: Runner, config: EngineConfig) -> "Features":
        """The features of an engine."""
        page_size, invariant = config.cache.page_size, config.scheduler.batch_invariant
        revisions = Revisions.of(runner.model, runner.attention, page_size, invariant)
        return cls(runner.attention, revisions, Evictions(runner.attention))

    def register(self, sequence: Sequence, request: Request) -> None:
        """Register the features that ``request`` uses with ``sequence``. Raises InvalidRequest
        and InvalidOption for a revision that is impossible."""
        sequence.features.extend(self._features(sequence, request))

    def _features(self, sequence: Sequence, request: Request) -> Iterator[Feature]:
        if sequence.policy is not None and request.select is not None:
            yield SelectedPages(sequence.policy, request.select)
        if sequence.hosted:
            yield HostedReads()
        if request.revise is not None:
            # behind the choice of the newest row: earlier rows read what it chooses
            if sequence.hosted:
                _require_exact_indexes(sequence)
                revision = self.revisions.hosted(request.revise)
            else:
                revision = self.revisions.revision(request.revise, sequence.policy)
            if revision is not None:
                yield revision
        if sequence.apart is not None:
            yield ApeRows(self.attention, sequence.apart)
        if request.select is not None:
            eviction = self.evictions.eviction(sequence, request)
            if eviction is not None:
                yield eviction


@dataclass(frozen=True)
class SelectedPages(Feature):
    """The newest row of an output selects its pages by a policy."""

    policy: PagePolicy
    select: Select

    def rows(
        self, sequence: FeatureSequence, rows: list[DecodeRow], num_outputs: int, num_new_rows: int
    ) -> list[DecodeRow]:
        select, page_size = self.select, sequence.page_size
        if sequence.num_tokens <= (select.dense_below or 0):
            return rows
        [row] = rows
        # the newest token's page is not full before it is stored
        sealed = (len(sequence.tail.tokens) - 1) // page_size
        every = select.recall_every
        measured = every > 0 and len(sequence.output_token_ids) % every == 0
        selecting = SelectingRow(
            row.position, row.settled, row.tail, self.policy, sealed, measured=measured
        )
        most = selecting.num_candidates
        limit = self.policy.limit(most, selecting.num_other(page_size))
        # a row whose limit covers all candidates reads them densely
        chooses = most and (limit < most or self.policy.counts_on_device)
        return [selecting] if chooses else rows


class HostedReads(Feature):
    """The newest row of an output reads host-resident documents."""

    def rows(
        self, sequence: FeatureSequence, rows: list[DecodeRow], num_outputs: int, num_new_rows: int
    ) -> list[DecodeRow]:
        [row] = rows
        return [DecodeRow(row.position, row.settled, row.tail, hosted=sequence.hosted_reads)]


def _require_exact_indexes(sequence: Sequence) -> None:
    """Raise InvalidRequest if revised rows would read an index that estimates."""
    indexes = [use.segment.index for use in sequence.hosted]
    if any(index is not None and index.config.estimate for index in indexes):
        raise InvalidRequest(
            "revise can't be combined with an index that estimates: what a row reads later would "
            "have to be taken out of its estimate; host the document without estimate, or leave "
            "revise out",
            "revise",
        )
