"""Policies in requests: a name, or an object with a budget and options."""

from typing import Annotated, Literal

from pydantic import Field

from looseleaf.config import MAX_WINDOW, FuseSelector, GroupRule, Local, SelectPolicy
from looseleaf.server.protocol.base import FIRST_ONLY, Strict


class FuseInput(Strict):
    """Tokens of reused documents to recompute at their positions."""

    selector: FuseSelector
    ratio: float | None = Field(None, ge=0, le=1, description="Share of the documents' tokens.")
    tokens: int | None = Field(
        None, ge=0, le=2**31, description="Number of tokens; for `first`, per document."
    )
    threshold: float | None = Field(
        None, description="Recompute tokens whose score is above this value."
    )
    seconds: float | None = Field(
        None, gt=0, le=3600, description="Budget of compute time for the answering pass."
    )
    watched_share: float | None = Field(
        None, gt=0, le=1, description="Share of last layers whose attention is observed."
    )
    check_layers: Annotated[list[int], Field(min_length=1, max_length=1024), FIRST_ONLY] | None = (
        Field(None, description="Layers that measure deviation, ascending, from 1.")
    )
    check_factors: (
        Annotated[list[float], Field(min_length=1, max_length=1024), FIRST_ONLY] | None
    ) = Field(None, description="Tokens that each check layer keeps, in budgets, descending to 1.")
    balanced: bool | None = Field(
        None, description="Raise the budget to fill the loading time of the documents."
    )
    temperature: float | None = Field(
        None,
        ge=0.001,
        le=100,
        description="For `ape`: divisor of document scores.",
    )
    scale: float | None = Field(
        None, ge=0.001, le=100, description="For `ape`: factor of the documents' log-sum-exp."
    )


FusePolicy = FuseSelector | FuseInput
"""A selector's name means its default budget."""


class SelectInput(Strict):
    """Keys that an output token reads, in pages."""

    policy: SelectPolicy
    tokens: int | None = Field(None, ge=1, le=2**31, description="Most tokens to read.")
    ratio: float | None = Field(None, gt=0, le=1, description="Largest share of the context.")
    mass: float | None = Field(
        None, gt=0, le=1, description="Read the fewest keys with this estimated attention mass."
    )
    sink: int | None = Field(None, ge=0, le=2**31, description="First tokens, always read.")
    recent: int | None = Field(None, ge=0, le=2**31, description="Last tokens, always read.")
    dense_layers: Annotated[list[int], Field(max_length=1024), FIRST_ONLY] | None = Field(
        None, description="Layers that read all keys, ascending, from 0."
    )
    dense_below: int | None = Field(
        None, ge=0, le=2**31, description="Read all keys of contexts up to this many tokens."
    )
    layer_budgets: (
        Literal["flat", "pyramid"]
        | Annotated[list[float], Field(min_length=1, max_length=1024), FIRST_ONLY]
    ) | None = Field(
        None, description="Distribution of the budget over layers; a list has one weight each."
    )
    anchors: Annotated[list[int], Field(max_length=1024), FIRST_ONLY] | None = Field(
        None, description="Layers whose choice of pages serves the layers after them, ascending."
    )
    group: GroupRule | None = Field(
        None, description="Combination of page scores of query heads that share a KV head."
    )
    recall_every: int | None = Field(
        None, ge=0, le=2**31, description="Measure the attention mass on every nth token."
    )


SelectChoice = SelectPolicy | SelectInput
"""A policy's name means its default budget."""


class ReviseInput(Strict):
    """The window of last tokens that also read the newest token's keys."""

    window: int = Field(ge=1, le=MAX_WINDOW, description="Includes the newest token; 1 is off.")
    adaptive: bool = Field(False, description="Shrink the window for large batches.")
    local: Local = Field(
        "exact", description="`stale` keeps earlier reads of pages that still change."
    )


ReviseChoice = Annotated[int, Field(ge=1, le=MAX_WINDOW)] | ReviseInput
"""A number is the window."""
