"""Completion requests: raw prompts, as text or as token ids."""

from typing import Annotated, Literal

from pydantic import Field

from looseleaf.server.protocol.base import FIRST_ONLY
from looseleaf.server.protocol.common import GenerationRequest

MAX_TOKENS = 2**22
"""More than any context holds: the model's own limit is told in its own words."""

Tokens = Annotated[list[int], Field(min_length=1, max_length=MAX_TOKENS), FIRST_ONLY]


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``. Markers in a text are text: send token ids for those."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=4096), FIRST_ONLY]
        | Annotated[list[Tokens], Field(min_length=1, max_length=4096), FIRST_ONLY]
    )
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else list(prompt)
