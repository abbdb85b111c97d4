"""Bodies of the endpoints for models, tokens and the server's state."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from looseleaf.server.protocol.base import FIRST_ONLY, Defaulting, Strict
from looseleaf.server.protocol.chat import Messages
from looseleaf.server.protocol.common import DocumentInputs, Name
from looseleaf.server.protocol.completion import MAX_TOKENS


class ModelBody(Strict):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["looseleaf"] = "looseleaf"
    root: str = Field(description="The name of the base model.")
    max_model_len: int
    system_prompt_tokens: int = Field(description="Tokens of its system prompt.")


class ModelList(Strict):
    """All served models; the first is the base model."""

    object: Literal["list"] = "list"
    data: list[ModelBody]


class HoldingsBody(Strict):
    """The documents that a replica holds, for routers."""

    object: Literal["holdings"] = "holdings"
    version: str = Field(description="Changes with `documents`; `after` of the next call.")
    documents: dict[str, int] | None = Field(
        description="Tokens of documents by their tags, at most 4096; null if unchanged."
    )
    running: int
    waiting: int
    pages: int
    available: int = Field(description="Pages that are free or evictable.")


class TokenizeRequest(Defaulting):
    """``POST /tokenize``: a raw prompt, or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    markers: bool | None = Field(
        None,
        description="Read markers in `prompt` as special tokens; completions do not. The default "
        "is `true` if `add_special_tokens` is given.",
    )
    add_special_tokens: bool | None = Field(
        None, description="`false` leaves the begin-of-text token out of `prompt`."
    )
    messages: Messages | None = None
    documents: DocumentInputs | None = None

    @model_validator(mode="after")
    def _agree(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.markers and self.prompt is None:
            raise ValueError("markers needs a prompt: leave it out")
        if self.markers and self.documents:
            raise ValueError("markers can't be combined with documents: drop one of them")
        if self.add_special_tokens is False and (self.prompt is None or self.documents):
            raise ValueError("add_special_tokens: false needs a prompt alone: leave it out")
        return self


class TokenizeBody(Strict):
    """The prompt's tokens."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(Defaulting):
    """``POST /detokenize``."""

    model: Name | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_TOKENS), FIRST_ONLY]


class DetokenizeBody(Strict):
    """The text of tokens, with special tokens."""

    prompt: str


class VersionBody(Strict):
    """The server's version."""

    version: str


class TokenizerBody(Strict):
    """The tokenizer of the model."""

    vocab_size: int
    bos_token_id: int | None
    bos_token: str | None
    eos_token_ids: list[int]
    eos_token: str | None = Field(description="The first of `eos_token_ids`.")
    special_tokens: dict[str, int]
    chat_template: str | None
    max_model_len: int


class StateBody(Strict):
    """The server's state."""

    status: Literal["ok", "ready", "draining", "stopped", "stuck"]
