"""Completion requests: raw prompts, as text or as token ids."""

from typing import Annotated, Literal

from pydantic import Field

from looseleaf.server.protocol.base import FIRST_ONLY
from looseleaf.server.protocol.common import GenerationRequest

MAX_TOKENS = 2**22
"""Above every model's context, whose own limit has a clearer message."""

Tokens = Annotated[list[int], Field(min_length=1, max_length=MAX_TOKENS), FIRST_ONLY]


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``. Special tokens in a text are text: send token ids for them."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=4096), FIRST_ONLY]
        | Annotated[list[Tokens], Field(min_length=1, max_length=4096), FIRST_ONLY]
    )
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: Literal[""] | None = None
    echo: bool | None = Field(
        None, description="Begin the text, and its `logprobs`, with the prompt."
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else list(prompt)
