"""What chat and completion requests are answered with: OpenAI's shapes, and what was reused."""

from typing import Any, Literal

from pydantic import Field

from looseleaf.server.protocol.base import Strict
from looseleaf.server.protocol.policies import FuseInput, ReviseInput, SelectInput


class PromptTokensDetails(Strict):
    """Of the prompt's tokens, those whose keys and values were there as an exact prefix."""

    cached_tokens: int


class Usage(Strict):
    """Tokens of the prompts and of all outputs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class DocumentReport(Strict):
    """Where a document's keys and values came from, and what that took."""

    id: str | None
    title: str | None
    prompt: int | None = Field(
        None, description="Which prompt it belongs to, if there are several."
    )
    tokens: int
    offset: int
    source: Literal["cached", "computed", "awaited", "loaded"]
    tier: str | None = Field(
        None, description="Where it was loaded from; or, if it is computed, what failed to give it."
    )
    seconds: float | None
    recomputed: int = Field(
        0, description="Of its tokens, those computed again for this prompt; 0 until it is known."
    )
    hosted: bool = Field(False, description="Whether it is read outside of the pool.")


class Policies(Strict):
    """The policies in force; `fuse` is none where there was nothing to compute again."""

    fuse: FuseInput
    select: SelectInput
    revise: Literal[1] | ReviseInput = 1


class AttentionReport(Strict):
    """How the outputs' rows read their keys: alone, or together with rows of other outputs."""

    decode_steps: int
    grouped_steps: int
    keys_read: int
    keys_shared: int


class SelectionReport(Strict):
    """What output tokens read under the policy; pages are counted once a layer and KV head, keys of
    hosted documents once a layer and query head."""

    chosen_steps: int
    dense_steps: int
    pages_read: int
    pages_held: int
    keys_read: int
    keys_there: int
    bytes_read: int
    recall: float | None = Field(
        None, description="Share of the attention that what was read held, where it was measured."
    )


class RevisionReport(Strict):
    """What revision added: the pages that a token has read with 0 to 7 later ones, in all, as a
    multiple of those that it read by itself; of hosted documents keys, as far as windows go."""

    exposure: list[float]


class Times(Strict):
    """Seconds from the request's arrival at the engine."""

    queued: float | None
    first_token: float | None
    total: float | None


class LoadingReport(Strict):
    """What was expected of the documents that came from tiers, and what it was, in seconds."""

    tiers: list[str]
    bytes: int
    load_predicted: float | None
    load_seconds: float | None
    total_predicted: float | None
    total_seconds: float | None
    ratio: float | None


class LooseleafReport(Strict):
    """What was reused and what was computed. Tokens of an exact prefix and tokens of documents
    that were encoded on their own are never added up."""

    documents: list[DocumentReport]
    text_tokens: int
    text_tokens_cached: int
    document_tokens_reused: int
    document_tokens_computed: int
    document_tokens_recomputed: int
    preempted_tokens: int
    loading: list[LoadingReport]
    policies: Policies
    attention: AttentionReport
    selection: SelectionReport | None = None
    revision: RevisionReport | None = None
    times: Times


class TopLogprob(Strict):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(TopLogprob):
    """A token of the output, and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Strict):
    """One entry a token of the output."""

    content: list[TokenLogprobs] | None
    refusal: None = None


class AssistantMessage(Strict):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Strict):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(Strict):
    """The answers to a chat request."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    looseleaf: LooseleafReport


class CompletionLogprobs(Strict):
    """Columns of equal length, one entry a token of the output."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Strict):
    """One output."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Strict):
    """The outputs of a completion request."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    looseleaf: LooseleafReport


class ErrorDetail(Strict):
    """What went wrong, and which field of the request did it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Strict):
    """Every error has this shape."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in (
        (400, "The request can't be served as asked."),
        (401, "No key, or an unknown one."),
        (404, "No such model or document."),
        (408, "The deadline has passed."),
        (413, "The body is too large."),
        (415, "The body is not JSON."),
        (429, "Too many requests: see Retry-After."),
        (500, "The server failed on this request."),
        (503, "Not ready, or shutting down."),
        (507, "The server's disk did not take what it was to keep."),
    )
}
"""What any endpoint may answer besides its result."""
