"""Fields that chat and completion requests share: sampling, documents, policies, formats."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from looseleaf.config import Reuse
from looseleaf.server.protocol.base import FIRST_ONLY, Lenient, Strict
from looseleaf.server.protocol.policies import FusePolicy, ReviseChoice, SelectChoice
from looseleaf.server.protocol.structured import Choices, Schema, StructuredOutputs

Name = Annotated[str, Field(min_length=1, max_length=256)]
DocumentId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
Context = Literal["lead", "alone", "prompt"]


class DocumentInput(Strict):
    """A document: its text, or the id of a registered document."""

    id: DocumentId | None = Field(
        None, description="With `text`: a label for the report. Alone: a registered document."
    )
    title: str | None = Field(None, max_length=1024)
    text: str | None = None
    context: Context | None = Field(
        None,
        description="Context of `text`: `lead` (the default) is the text before the first "
        "document, `alone` is empty, `prompt` is the whole prompt before it.",
    )


DocumentInputs = Annotated[list[DocumentInput], Field(max_length=4096), FIRST_ONLY]
"""Above every server's own limit, which has a clearer message."""


class StreamOptions(Lenient):
    """Contents of a stream besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="With `include_usage`: every chunk has the usage so far."
    )
    include_obfuscation: Literal[False] | None = None


class TextFormat(Strict):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """A named JSON schema. Outputs always follow it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(
        None,
        description="`true` forbids undeclared properties in objects with declared ones, unless "
        "the schema sets `additionalProperties`.",
    )


class JsonSchemaFormat(Strict):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


MAX_BIASES = 1024
MAX_PAIRS = 16


def _at_most(number: int, name: str, entries: str) -> BeforeValidator:
    """The most entries of the field ``name``."""

    def check(value: Any) -> Any:
        # checked first, because every wrong element would add an error
        if isinstance(value, dict) and len(value) > number:
            raise ValueError(f"{name} has {len(value)} {entries}: give at most {number}")
        return value

    return BeforeValidator(check)


LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float],
    Field(max_length=MAX_BIASES),
    _at_most(MAX_BIASES, "logit_bias", "tokens"),
]


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)] | None],
    Field(max_length=MAX_PAIRS),
    _at_most(MAX_PAIRS, "metadata", "pairs"),
]
"""OpenAI's limits, since a stored response repeats it. Anthropic's clients also send null."""


class NeutralFields(Lenient):
    """Fields of other servers' clients that have no effect here, or one accepted value."""

    user: str | None = Field(None, max_length=1024, description="A label for the log.")
    store: bool | None = Field(None, description="No effect: answers are not stored.")
    metadata: Metadata | None = Field(
        None, description="No effect. A stored response repeats its strings."
    )
    service_tier: str | None = Field(None, max_length=64, description="No effect.")
    prompt_cache_key: str | None = Field(
        None, max_length=1024, description="No effect: see `cache_salt`."
    )
    prompt_cache_retention: str | None = Field(None, description="No effect.")
    safety_identifier: str | None = Field(None, max_length=1024, description="No effect.")
    request_id: str | None = Field(None, description="No effect: see the header X-Request-Id.")
    priority: Literal[0] | None = None
    use_beam_search: Literal[False] | None = None
    best_of: Literal[1] | None = None
    length_penalty: Literal[1] | Annotated[float, Field(ge=1, le=1)] | None = None
    early_stopping: Literal[False] | None = None
    detokenize: Literal[True] | None = None
    truncate_prompt_tokens: None = None
    spaces_between_special_tokens: bool | None = Field(None, description="No effect.")


class LooseleafOptions(Strict):
    """Options of this server that no other server has."""

    reuse: Reuse | None = Field(
        None,
        description="Most reuse for this request, at most the server's: `exact` reads prefixes "
        "only, `documents` also marked documents, `discover` also texts that earlier prompts "
        "contained.",
    )


class EngineRequest(NeutralFields):
    """Fields of all requests that generate text; sampling fields beyond OpenAI's are vLLM's."""

    model: Name
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stream: bool | None = None
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Requests share cached keys and values only with those of the same salt.",
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="Seconds until the answer ends with 408, at most the server's limit.",
    )
    documents: DocumentInputs | None = None
    looseleaf: LooseleafOptions | None = None
    fuse: FusePolicy | None = Field(
        None,
        description="Document tokens to recompute: a selector's name, or an object with its "
        "budget.",
    )
    select: SelectChoice | None = Field(
        None,
        description="Keys that an output token reads: a policy's name, or an object with its "
        "budget.",
    )
    revise: ReviseChoice | None = Field(
        None,
        description="Window of last tokens that also read newly selected keys: a number, or an "
        "object. Needs `select`.",
    )


class GenerationRequest(EngineRequest):
    """Fields of chat and completion requests."""

    logit_bias: LogitBias | None = None
    n: int | None = Field(None, ge=1, le=1024)
    max_tokens: int | None = Field(
        None, ge=0, le=2**31, description="0 computes the prompt and answers without text."
    )
    min_tokens: int | None = Field(None, ge=0, le=2**31)
    stop: str | Annotated[list[str], Field(max_length=16), FIRST_ONLY] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64), FIRST_ONLY] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(
        None, description="A constraint of the text; the `guided_` fields are its older names."
    )
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    skip_special_tokens: bool | None = Field(
        None, description="`false` leaves special tokens in the text."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="Likeliest tokens to report for each prompt token, besides the token itself. "
        "Tokens inside documents have null. Not with `stream`.",
    )
    return_token_ids: bool | None = Field(
        None, description="Add `token_ids` and `prompt_token_ids` to every choice."
    )

    @model_validator(mode="after")
    def _stream_agrees(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are part of a whole answer: leave stream out")
        guides = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        formats = (self.structured_outputs, *guides)
        if sum(value is not None for value in formats) + (self.response_format is not None) > 1:
            raise ValueError(
                "give one of response_format, structured_outputs and the guided_ fields"
            )
        return self
