"""Models, tokens and the server's own state."""

from typing import Literal

from pydantic import Field, model_validator

from looseleaf.server.protocol.base import Defaulting, Strict
from looseleaf.server.protocol.chat import Messages
from looseleaf.server.protocol.common import DocumentInputs, Name


class ModelBody(Strict):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["looseleaf"] = "looseleaf"
    max_model_len: int
    system_prompt_tokens: int = Field(description="Tokens that stand before every chat.")


class ModelList(Strict):
    """All models served here; the first one is the plain one."""

    object: Literal["list"] = "list"
    data: list[ModelBody]


class TokenizeRequest(Defaulting):
    """``POST /tokenize``: a raw prompt, or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    markers: bool = Field(
        False, description="Whether markers in `prompt` are tokens; in completions they are text."
    )
    messages: Messages | None = None
    documents: DocumentInputs | None = None

    @model_validator(mode="after")
    def _agree(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give a prompt or messages, one of them")
        if self.markers and self.prompt is None:
            raise ValueError("markers is about a prompt: leave it out")
        if self.markers and self.documents:
            raise ValueError("documents stand before prompts whose markers are text: drop markers")
        return self


class TokenizeBody(Strict):
    """The tokens that the model would read."""

    tokens: list[int]
    count: int
    max_model_len: int


class StateBody(Strict):
    """How the server is."""

    status: Literal["ok", "ready", "draining", "stopped", "stuck"]
