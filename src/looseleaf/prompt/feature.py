"""The hooks by which a feature of a request changes the steps of its sequences."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import DecodeRow, ReadSpan
from looseleaf.index.host.attend import HostedRead
from looseleaf.prompt.placements import TextRun
from looseleaf.types import Attend


@runtime_checkable
class FeatureSequence(Protocol):
    """The part of a sequence that features read."""

    num_evicted: int
    page_size: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the output so far."""
        ...

    @property
    def output_token_ids(self) -> Rows[int]:
        """The output so far."""
        ...

    @property
    def hosted_reads(self) -> tuple[HostedRead, ...]:
        """The reads of hosted documents."""
        ...

    @property
    def features(self) -> "Rows[Feature]":
        """The features that its request registered."""
        ...

    @property
    def tail(self) -> TextRun:
        """The sequence's own text, which ends with its output."""
        ...

    @property
    def decodes(self) -> bool:
        """Whether the prompt is computed and the output is not complete."""
        ...

    def spans_apart(self) -> tuple[ReadSpan, ...]:
        """The documents, if they are read apart from text."""
        ...


@dataclass(frozen=True)
class FeatureRows:
    """Consecutive rows of a step that belong to one sequence, and the keys that they read."""

    sequence: FeatureSequence
    rows: range
    read: DecodeRow | PrefillChunk
    in_tail: bool = True
    ends_prompt: bool = False


class Feature:
    """A feature that one output uses beyond plain decoding. Its request registers it with the
    sequence; steps call its hooks. Hooks that a class leaves out do nothing.

    ``replays``: steps with its rows may replay as CUDA graphs. ``sees_queries``: the last layer
    makes queries of all rows."""

    replays: ClassVar[bool] = True
    sees_queries: ClassVar[bool] = False

    def rows(
        self, sequence: FeatureSequence, rows: list[DecodeRow], num_outputs: int, num_new_rows: int
    ) -> list[DecodeRow]:
        """The decode rows of the next step, the newest first, from those of earlier features."""
        return rows

    def wrap(self, attend: Attend, rows: FeatureRows, last_rows: Rows[int] | None) -> Attend:
        """The attention of ``rows`` of a step; ``last_rows`` as `logit_rows` in `StepRows`."""
        return attend

    def launched(self) -> None:
        """A step with decode rows of the sequence is launched."""

    def computed(self, sequence: FeatureSequence, *, ends_prompt: bool) -> None:
        """A step with rows of the sequence is computed; it may have ended the prompt."""

    def reset(self) -> None:
        """The sequence has given its pages back."""
