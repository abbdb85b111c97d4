"""Messages between an engine's process and the processes that use it, in MessagePack.

Token ids are little-endian int32. A message never contains code: both ends build its types."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from looseleaf.config import Fuse, Revise, Select
from looseleaf.engine.reports.outputs import (
    AttentionPath,
    RequestMetrics,
    ReuseReport,
    RevisionReport,
    SelectReport,
)
from looseleaf.engine.sampling.sampler import TokenLogprob
from looseleaf.llm.remote.wire_error import WireError
from looseleaf.prompt.request import DocumentContent, DocumentPart, PromptParts, Request, TextPart
from looseleaf.sampling_params import Grammar, SamplingParams


class WirePart(msgspec.Struct, array_like=True):
    """A part of a prompt; ``context_length``, ``name`` and ``tag`` are of documents."""

    ids: bytes
    num_shared: int = 0
    opens_answer: bool = False
    context_length: int | None = None
    name: str = ""
    tag: str = ""


class Open(msgspec.Struct, tag="open"):
    """Begin the request ``name`` as stream ``number``. ``since`` is its arrival, on
    `time.perf_counter`, which the processes of a machine share. ``params`` and the policies have
    the fields that differ from their defaults."""

    number: int
    name: str
    parts: list[WirePart]
    params: dict[str, Any]
    since: float
    salt: str = ""
    deadline: float | None = None
    fuse: dict[str, Any] | None = None
    select: dict[str, Any] | None = None
    revise: dict[str, Any] | None = None


class Leave(msgspec.Struct, tag="leave"):
    """Abort a stream."""

    number: int


class Cut(msgspec.Struct, tag="cut"):
    """End one output of a stream, because its text has a stop string."""

    number: int
    output: int


class Call(msgspec.Struct, tag="call"):
    """Call an operation of the engine; replies have the same number."""

    number: int
    method: str
    arguments: dict[str, Any]


class Delta(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one output; ``finish`` is the reason of its end, None while it grows."""

    number: int
    output: int
    tokens: list[int]
    logprobs: list[tuple[TokenLogprob, ...]] | None = None
    finish: str | None = None


class Report(msgspec.Struct, array_like=True):
    """The state of a stream besides its tokens: at its first token, and at its end.

    The first report has the scores of the prompt."""

    number: int
    finished: bool = False
    error: WireError | None = None
    reuse: ReuseReport | None = None
    metrics: RequestMetrics | None = None
    attention: AttentionPath | None = None
    revision: RevisionReport | None = None
    select: SelectReport | None = None
    prompt_logprobs: list[tuple[TokenLogprob, ...] | None] | None = None


class Step(msgspec.Struct, tag="step"):
    """All news of one step of the engine for one process."""

    reports: list[Report]
    deltas: list[Delta]


class Reply(msgspec.Struct, tag="reply"):
    """A result of a call. The last reply of a call is not ``more``."""

    number: int
    value: Any = None
    error: WireError | None = None
    more: bool = False


class Pulse(msgspec.Struct, tag="pulse"):
    """Sent at intervals: the age of the engine's step in seconds."""

    busy: float


ToEngine = Open | Leave | Cut | Call
FromEngine = Step | Reply | Pulse


def ids_to_bytes(ids: Iterable[int]) -> bytes:
    """Token ids as bytes."""
    return np.fromiter(ids, dtype="<i4").tobytes()


def ids_from_bytes(content: bytes) -> tuple[int, ...]:
    """The token ids of `ids_to_bytes`."""
    return tuple(np.frombuffer(content, dtype="<i4").tolist())


_ENTRY_BYTES, _ID_BYTES = 1024, 44


class DocumentCache:
    """The tokens and keys of the latest documents, by salt and bytes.

    A document of many requests is then read and hashed once. The most ``num_bytes`` are kept."""

    def __init__(self, num_bytes: int = 1 << 28) -> None:
        self._room = num_bytes
        self._entries: OrderedDict[tuple[str, bytes], tuple[tuple[int, ...], DocumentContent]]
        self._entries = OrderedDict()

    def part(self, part: WirePart, salt: str) -> DocumentPart:
        """The document of a message."""
        assert part.context_length is not None, "a text has no keys of its own"
        key = salt, part.ids
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = ids_from_bytes(part.ids), DocumentContent()
            self._room -= _memory(part.ids)
            while self._room < 0 and len(self._entries) > 1:
                (_, ids), _ = self._entries.popitem(last=False)
                self._room += _memory(ids)
        self._entries.move_to_end(key)
        tokens, content = entry
        return DocumentPart(tokens, part.context_length, part.name, content, part.tag)


def _memory(ids: bytes) -> int:
    """Bytes of an entry: of an id four, a Python integer and a reference."""
    return _ENTRY_BYTES + _ID_BYTES * (len(ids) // 4)


def parts_to_wire(parts: PromptParts) -> list[WirePart]:
    """A tokenized prompt as messages."""
    return [
        WirePart(ids_to_bytes(part.tokens), part.num_shared, part.opens_answer)
        if isinstance(part, TextPart)
        else WirePart(
            part.ids.tobytes(),
            context_length=part.context_length,
            name=part.name,
            tag=part.tag,
        )
        for part in parts
    ]


def parts_from_wire(parts: Iterable[WirePart], documents: DocumentCache, salt: str) -> PromptParts:
    """The prompt of `parts_to_wire`."""
    return tuple(
        TextPart(ids_from_bytes(part.ids), part.num_shared, part.opens_answer)
        if part.context_length is None
        else documents.part(part, salt)
        for part in parts
    )


def changed_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    changed = {}
    for field in fields(value):
        content = getattr(value, field.name)
        if content != field.default:
            changed[field.name] = content
    return changed


def open_message(request: Request, number: int, since: float) -> Open:
    """The message that begins ``request``."""
    params = changed_fields(request.params)
    if request.params.grammar is not None:
        params["grammar"] = changed_fields(request.params.grammar)
    policies = {
        name: None if policy is None else changed_fields(policy)
        for name, policy in (
            ("fuse", request.fuse),
            ("select", request.select),
            ("revise", request.revise),
        )
    }
    parts = parts_to_wire(request.parts)
    return Open(
        number, request.request_id, parts, params, since, request.salt, request.deadline, **policies
    )


def request_of(message: Open, documents: DocumentCache) -> Request:
    """The request of `open_message`; its caller decodes the output."""
    params = dict(message.params)
    grammar = params.pop("grammar", None)
    return Request(
        message.name,
        parts_from_wire(message.parts, documents, message.salt),
        SamplingParams(**params, grammar=None if grammar is None else Grammar(**grammar)),
        message.salt,
        message.deadline,
        fuse=_policy(Fuse, message.fuse),
        select=_policy(Select, message.select),
        revise=_policy(Revise, message.revise),
        decodes=False,
    )


def _policy(kind: Any, options: Mapping[str, Any] | None) -> Any:
    return None if options is None else kind(**options)
