"""How a request's policies are written: a word, or an object that also says how much."""

from typing import Annotated, Literal

from pydantic import Field

from looseleaf.config import MAX_WINDOW, FuseSelector, GroupRule, Local, SelectPolicy
from looseleaf.server.protocol.base import FIRST_ONLY, Strict


class FuseInput(Strict):
    """Which tokens of reused documents are computed again, in their place, and how many."""

    selector: FuseSelector
    ratio: float | None = Field(None, ge=0, le=1, description="A share of the documents' tokens.")
    tokens: int | None = Field(
        None, ge=0, le=2**31, description="A number; for `first`, of each document."
    )
    threshold: float | None = Field(
        None, description="The score above which a token is computed again."
    )
    seconds: float | None = Field(
        None, gt=0, le=3600, description="As many as the answering pass can compute in that time."
    )
    watched_share: float | None = Field(
        None, gt=0, le=1, description="Share of the layers, the last ones, that show what is read."
    )
    check_layers: Annotated[list[int], Field(min_length=1, max_length=1024), FIRST_ONLY] | None = (
        Field(None, description="Layers at which deviation is measured, rising, from 1.")
    )
    check_factors: (
        Annotated[list[float], Field(min_length=1, max_length=1024), FIRST_ONLY] | None
    ) = Field(
        None, description="What each of them leaves, in budgets, never rising, the last one 1."
    )
    balanced: bool | None = Field(
        None, description="Raise the budget to what can be computed while the documents load."
    )
    temperature: float | None = Field(
        None,
        ge=0.001,
        le=100,
        description="For `ape`: what scores of document tokens are divided by.",
    )
    scale: float | None = Field(
        None, ge=0.001, le=100, description="For `ape`: what their log-sum-exp is multiplied by."
    )


FusePolicy = FuseSelector | FuseInput
"""A selector's name alone takes its default budget."""


class SelectInput(Strict):
    """Which keys an output token reads, page by page, and how many."""

    policy: SelectPolicy
    tokens: int | None = Field(None, ge=1, le=2**31, description="So many tokens at most.")
    ratio: float | None = Field(None, gt=0, le=1, description="A share of the context at most.")
    mass: float | None = Field(
        None, gt=0, le=1, description="As few as are expected to hold that share of the attention."
    )
    sink: int | None = Field(None, ge=0, le=2**31, description="First tokens, always read.")
    recent: int | None = Field(None, ge=0, le=2**31, description="Last tokens, always read.")
    dense_layers: Annotated[list[int], Field(max_length=1024), FIRST_ONLY] | None = Field(
        None, description="Layers that read everything, rising, from 0."
    )
    dense_below: int | None = Field(
        None, ge=0, le=2**31, description="Contexts of at most so many tokens are read whole."
    )
    layer_budgets: (
        Literal["flat", "pyramid"]
        | Annotated[list[float], Field(min_length=1, max_length=1024), FIRST_ONLY]
    ) | None = Field(
        None, description="How the budget is spread over layers; a list has a weight for each."
    )
    group: GroupRule | None = Field(
        None, description="How query heads that share a KV head agree on a page."
    )
    recall_every: int | None = Field(
        None, ge=0, le=2**31, description="Measure the share of attention on every nth token."
    )


SelectChoice = SelectPolicy | SelectInput
"""A policy's name alone takes its default budget."""


class ReviseInput(Strict):
    """How many of the last tokens go on to read with the newest one."""

    window: int = Field(ge=1, le=MAX_WINDOW, description="The newest token counts; 1 is off.")
    adaptive: bool = Field(False, description="Fewer while the batch is large.")
    local: Local = Field(
        "exact", description="`stale` keeps what was read of pages that still change."
    )


ReviseChoice = Annotated[int, Field(ge=1, le=MAX_WINDOW)] | ReviseInput
"""A number is the window."""
