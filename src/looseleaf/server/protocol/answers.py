"""Responses of chat and completion requests: OpenAI's shapes, and the reuse report."""

from typing import Any, Literal

from pydantic import Field

from looseleaf.server.protocol.base import Strict
from looseleaf.server.protocol.policies import FuseInput, ReviseInput, SelectInput


class PromptTokensDetails(Strict):
    """Prompt tokens that were not computed; the `looseleaf` report has their kinds."""

    cached_tokens: int


class Usage(Strict):
    """Tokens of the prompts and of all outputs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class DocumentReport(Strict):
    """The source of a document's keys and values, and the time until they were ready."""

    id: str | None
    title: str | None
    prompt: int | None = Field(None, description="Index of its prompt, if the request has several.")
    tokens: int
    offset: int
    source: Literal["cached", "computed", "awaited", "loaded"]
    tier: str | None = Field(
        None, description="The tier that loaded it, or that failed to load a computed document."
    )
    seconds: float | None
    recomputed: int = Field(
        0, description="Tokens recomputed for this prompt; 0 until the selector has run."
    )
    hosted: bool = Field(False, description="Whether it is in host memory, behind an index.")


class Policies(Strict):
    """The effective policies; `fuse` is none if the request had nothing to recompute."""

    fuse: FuseInput
    select: SelectInput
    revise: Literal[1] | ReviseInput = 1


class AttentionReport(Strict):
    """Key reads of the outputs' rows, separate or shared with rows of other outputs."""

    decode_steps: int
    grouped_steps: int
    keys_read: int
    keys_shared: int


class SelectionReport(Strict):
    """Reads of output tokens under a select policy.

    Pages count per layer and KV head, keys of hosted documents per layer and query head."""

    chosen_steps: int
    dense_steps: int
    pages_read: int
    pages_held: int
    keys_read: int
    keys_there: int
    bytes_read: int
    recall: float | None = Field(
        None, description="Attention mass of the keys read, a share, where it was measured."
    )


class RevisionReport(Strict):
    """The exposure of a token: pages it has read after 0 to 7 later tokens.

    The unit is the token's own reads. Hosted documents count keys."""

    exposure: list[float]


class Times(Strict):
    """Seconds from the request's arrival at the engine."""

    queued: float | None
    first_token: float | None
    total: float | None


class LoadingReport(Strict):
    """Predicted and actual times of documents loaded from tiers, in seconds."""

    tiers: list[str]
    bytes: int
    load_predicted: float | None
    load_seconds: float | None
    total_predicted: float | None
    total_seconds: float | None
    ratio: float | None


class ReuseCounts(Strict):
    """Prompt tokens by the origin of their keys and values.

    ``exact`` tokens were computed after the same beginning of a prompt. ``out_of_context`` tokens
    are of documents that were computed before, behind their lead. ``discovered`` tokens are of
    documents that the server found, computed now or before."""

    level: Literal["exact", "documents", "discover"]
    exact: int
    out_of_context: int
    computed: int
    discovered: int


class LooseleafReport(Strict):
    """Reused and computed tokens; exact prefix hits and document tokens are separate counts."""

    documents: list[DocumentReport]
    reuse: ReuseCounts
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
    """An output token, and the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class PromptLogprob(Strict):
    """A token at a position of the prompt; its key is its id."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry per prompt token, null without a score: the first, and those inside documents."""


class ChatLogprobs(Strict):
    """One entry per output token."""

    content: list[TokenLogprobs] | None
    refusal: None = None


class AnswerFunction(Strict):
    """A called function, and the JSON text of its arguments."""

    name: str
    arguments: str


class AnswerToolCall(Strict):
    """A call that the client makes and answers with a message of role `tool`."""

    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class AssistantMessage(Strict):
    """The answer; its content may be null beside tool calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[AnswerToolCall] | None = Field(None, description="Absent without calls.")
    reasoning_content: str | None = Field(None, description="Absent without thoughts.")
    reasoning: str | None = Field(None, description="The same text, in another server's name.")


class ChatChoice(Strict):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = Field(None, description="With `return_token_ids`.")
    prompt_token_ids: list[int] | None = Field(None, description="With `return_token_ids`.")


class ChatCompletion(Strict):
    """The answers to a chat request."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = Field(None, description="With `prompt_logprobs`.")
    usage: Usage
    looseleaf: LooseleafReport


class CompletionLogprobs(Strict):
    """Columns of equal length, with one entry per output token; with `echo` prompt tokens first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Strict):
    """One output."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = Field(None, description="With `prompt_logprobs`.")
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = Field(None, description="With `return_token_ids`.")
    prompt_token_ids: list[int] | None = Field(None, description="With `return_token_ids`.")


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
    """The error, and the field of the request at fault."""

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
        (400, "The request is invalid, or exceeds a limit."),
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
"""Error responses of all endpoints."""
