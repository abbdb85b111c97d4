"""Wrong requests and their expected statuses; a page of the docs shows them as a table."""

import json
from dataclasses import dataclass, field
from typing import Any

from looseleaf.server.names import REFERENCE_NAME

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DOCUMENTS = "/v1/documents"
JSON_TYPE = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class BadInput:
    """``content`` is sent as it is; ``param`` is the field that the error must name."""

    name: str
    path: str
    content: bytes
    status: int = 400
    param: str | None = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON_TYPE))


_TOOLS = [{"type": "function", "function": {"name": "now"}}]


def _chat(**fields: Any) -> dict[str, Any]:
    user = [{"role": "user", "content": "Where is the archive?"}]
    return {"model": REFERENCE_NAME, "messages": user, "max_tokens": 4, **fields}


def _completion(**fields: Any) -> dict[str, Any]:
    return {"model": REFERENCE_NAME, "prompt": "The archive", "max_tokens": 4, **fields}


def chat(name: str, param: str | None = None, status: int = 400, **fields: Any) -> BadInput:
    """A chat request with one thing wrong."""
    return BadInput(name, CHAT, json.dumps(_chat(**fields)).encode(), status, param)


def raw(name: str, content: bytes, status: int = 400, **options: Any) -> BadInput:
    """A chat request whose bytes are wrong."""
    return BadInput(name, options.pop("path", CHAT), content, status, **options)


def completion(name: str, param: str | None = None, status: int = 400, **fields: Any) -> BadInput:
    return BadInput(name, COMPLETIONS, json.dumps(_completion(**fields)).encode(), status, param)


def register(name: str, param: str | None = None, status: int = 400, **fields: Any) -> BadInput:
    return BadInput(name, DOCUMENTS, json.dumps(fields).encode(), status, param)


def visit(name: str, method: str, path: str, status: int, param: str | None = None) -> BadInput:
    return BadInput(name, path, b"", status, param, method, {})


def _nested(depth: int) -> bytes:
    return b'{"model":"m","messages":' + b"[" * depth + b"]" * depth + b"}"


def _deep_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _format(schema: Any, name: str = "answer") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


BODIES = [
    raw("an empty body", b""),
    raw("a body that is not JSON", b"hello"),
    raw("half of a body", b'{"model": "looseleaf'),
    raw("a JSON array instead of an object", b"[]"),
    raw("a JSON string instead of an object", b'"hello"'),
    raw("null", b"null"),
    raw("invalid UTF-8", b'{"model":"\xff\xfe","messages":[]}'),
    raw("UTF-16", json.dumps(_chat()).encode("utf-16")),
    raw("arrays 100 deep", _nested(100)),
    raw("arrays 100,000 deep", _nested(100_000)),
    raw("100,000 empty arrays", b'{"model":"m","messages":[' + b"[]," * 99_999 + b"[]]}"),
    raw("the number NaN", b'{"model":"looseleaf-reference","temperature":NaN,"messages":[]}'),
    raw("the number Infinity", b'{"model":"looseleaf-reference","top_p":Infinity,"messages":[]}'),
    raw("the number 1e999", json.dumps(_chat()).encode()[:-1] + b',"metadata":{"x":1e999}}'),
    raw("a number of 5,000 digits", b'{"seed":' + b"9" * 5000 + b"}"),
    raw("the same name twice", b'{"model":"a","model":"b","messages":[]}'),
    raw("half of a surrogate pair", json.dumps(_chat(messages=_user("\ud800"))).encode()),
    raw("half of a pair as a name", json.dumps(_chat(**{"\udfff": 1})).encode()),
    raw("a comment in JSON", b'{"model":"m" /* mine */}'),
    raw("a form", b"model=m", 415, headers={"Content-Type": "application/x-www-form-urlencoded"}),
    raw("plain text", json.dumps(_chat()).encode(), 415, headers={"Content-Type": "text/plain"}),
    raw("no content type", json.dumps(_chat()).encode(), 415, headers={}),
    raw("a body of 40 MiB", b'{"model":"' + b"m" * (40 * 2**20) + b'"}', 413),
]

CHATS = [
    chat("no messages", "messages", messages=[]),
    chat("messages that are a string", "messages", messages="hello"),
    chat("messages that are null", "messages", messages=None),
    chat("a message without content", "messages.0", messages=[{"role": "user"}]),
    chat("a message whose content is null", "messages.0", messages=_user(None)),
    chat("a message whose content is a number", "messages.0.content", messages=_user(7)),
    chat("an empty list of content", "messages.0.content", messages=_user([])),
    chat("an unknown role", "messages.0.role", messages=[{"role": "root", "content": "x"}]),
    chat(
        "a role with a marker",
        "messages.0.role",
        messages=[{"role": "user|><|system", "content": "x"}],
    ),
    chat(
        "an image",
        "messages.0.content.0",
        messages=_user([{"type": "image_url", "image_url": {"url": "x"}}]),
    ),
    chat("a content part without a type", "messages.0.content.0", messages=_user([{"text": "x"}])),
    chat("an unknown model", "model", 404, model="gpt-7"),
    chat("a path as the model", "model", 404, model="../../etc/passwd"),
    chat("an empty model name", "model", model=""),
    chat("a tool without a function", "tools.0.function", tools=[{"type": "function"}]),
    chat("tools that the template does not show", "tools", tools=_TOOLS),
    chat("a forced call without a form", "tools", tools=_TOOLS, tool_choice="required"),
    chat("a temperature below 0", "temperature", temperature=-0.1),
    chat("a temperature of 1e308", "temperature", temperature=1e308),
    chat("a temperature as text", "temperature", temperature="1"),
    chat("a temperature that is true", "temperature", temperature=True),
    chat("a top_p of 0", "top_p", top_p=0),
    chat("n of 0", "n", n=0),
    chat("n of a million", "n", n=1_000_000),
    chat("n of 65, over the limit", "n", n=65, temperature=1),
    chat("n of 2 with temperature 0", None, n=2, temperature=0),
    chat("negative max_tokens", "max_tokens", max_tokens=-1),
    chat("max_tokens of 2^70", "max_tokens", max_tokens=2**70),
    chat("max_tokens beyond the context", None, max_tokens=1_000_000),
    chat("max_tokens of 1.5", "max_tokens", max_tokens=1.5),
    chat("min_tokens above max_tokens", None, min_tokens=9),
    chat("two limits that differ", None, max_completion_tokens=5),
    chat("a seed of 2^64", "seed", seed=2**64),
    chat("17 stop strings", "stop", stop=["x"] * 17),
    chat("an empty stop string", None, stop=""),
    chat("a stop string of 2,000 characters", "stop", stop="x" * 2000),
    chat("a negative stop token", "stop_token_ids", stop_token_ids=[-1]),
    chat("logit_bias of a word", "logit_bias.hello", logit_bias={"hello": 1}),
    chat("logit_bias of a negative token", "logit_bias.-1", logit_bias={"-1": 1}),
    chat("logit_bias beyond the vocabulary", "logit_bias", logit_bias={"99999999": 1}),
    chat("logit_bias of 1000", "logit_bias", logit_bias={"1": 1000}),
    chat("top_logprobs without logprobs", None, top_logprobs=2),
    chat("21 top_logprobs", "top_logprobs", logprobs=True, top_logprobs=21),
    chat("stream_options without a stream", None, stream_options={"include_usage": True}),
    chat("a stream that is 1", "stream", stream=1),
    chat("a deadline of 0", "deadline", deadline=0),
    chat("an unknown response format", "response_format", response_format={"type": "xml"}),
    chat("a schema of an unknown type", None, response_format=_format({"type": "thing"})),
    chat("a schema nested 100 deep", None, response_format=_format(_deep_schema(100))),
    chat("a schema with a reference to nothing", None, response_format=_format({"$ref": "#/no"})),
    chat(
        "a schema with a bad pattern",
        None,
        response_format=_format({"type": "string", "pattern": "("}),
    ),
    chat("an unknown fuse", "fuse", fuse="blend"),
    chat("a fuse of an unknown selector", "fuse.selector", fuse={"selector": "blend"}),
    chat("a fuse without a selector", "fuse.selector", fuse={"ratio": 0.1}),
    chat("a fuse with an unknown field", "fuse.share", fuse={"selector": "links", "share": 0.1}),
    chat("a fuse that is a number", "fuse", fuse=0.15),
    chat("a ratio above 1", "fuse.ratio", fuse={"selector": "links", "ratio": 1.5}),
    chat("a ratio as text", "fuse.ratio", fuse={"selector": "links", "ratio": "15%"}),
    chat("a ratio for a selector without one", "fuse", fuse={"selector": "ape", "ratio": 0.1}),
    chat("a fuse for evaluation only", "fuse", fuse="oracle"),
    chat("a scale of 0 for ape", "fuse.scale", fuse={"selector": "ape", "scale": 0}),
    chat(
        "documents at one place with text between them",
        None,
        fuse="ape",
        messages=_user(
            [
                {"type": "document", "text": "x"},
                {"type": "text", "text": "and"},
                {"type": "document", "text": "y"},
            ]
        ),
    ),
    chat("two budgets", "fuse", fuse={"selector": "links", "ratio": 0.1, "tokens": 9}),
    chat("negative tokens to fuse", "fuse.tokens", fuse={"selector": "first", "tokens": -1}),
    chat(
        "watched layers for a selector that watches none",
        "fuse",
        fuse={"selector": "random", "watched_share": 0.5},
    ),
    chat("check layers that fall", "fuse", fuse={"selector": "deviation", "check_layers": [3, 2]}),
    chat(
        "a check layer that the model has not",
        None,
        fuse={"selector": "deviation", "check_layers": [999]},
    ),
    completion("an unknown fuse for a prompt", "fuse", fuse="blend"),
    chat("an unknown select", "select", select="top-k"),
    chat("a select of an unknown policy", "select.policy", select={"policy": "top-k"}),
    chat("a select with an unknown field", "select.pages", select={"policy": "quest", "pages": 4}),
    chat(
        "two budgets of a select", "select", select={"policy": "quest", "tokens": 64, "ratio": 0.1}
    ),
    chat("a mass for a window", "select", select={"policy": "window", "mass": 0.9}),
    chat("a mass above 1", "select.mass", select={"policy": "quest", "mass": 1.5}),
    chat(
        "a dense layer that the model has not",
        None,
        select={"policy": "quest", "dense_layers": [999]},
    ),
    chat("an anchor that the model has not", None, select={"policy": "quest", "anchors": [999]}),
    chat(
        "weights of layers that the model has not",
        None,
        select={"policy": "quest", "layer_budgets": [1.5]},
    ),
    chat(
        "a schedule that a policy would not heed",
        "select",
        select={"policy": "h2o", "layer_budgets": "pyramid"},
    ),
    chat("revise without a select", "revise", revise=8),
    chat("a window that is too wide to revise", "revise", select="quest", revise=10),
    chat(
        "revise with other pages",
        "revise.local",
        select="quest",
        revise={"window": 2, "local": "near"},
    ),
    chat("revise by a word", "revise", select="quest", revise="window"),
    chat("revise where keys are thrown away", None, select="tova", revise=2),
    chat(
        "documents without a user message",
        "documents",
        messages=[{"role": "system", "content": "x"}],
        documents=[{"text": "x"}],
    ),
    chat("a document without text or id", "documents.0", documents=[{}]),
    chat("a document that is a string", "documents.0", documents=["text"]),
    chat("an empty document", "documents.1.text", documents=[{"text": "a"}, {"text": "  "}]),
    chat("an unknown document", None, 404, documents=[{"id": "nothing"}]),
    chat("a path as a document's id", "documents.0.id", documents=[{"id": "../../etc/passwd"}]),
    chat(
        "a title for a registered document",
        "documents.0.title",
        documents=[{"id": "x", "title": "y"}],
    ),
    chat(
        "a context for a registered document",
        "documents.0.context",
        documents=[{"id": "x", "context": "prompt"}],
    ),
    chat(
        "a document in an unknown context",
        "documents.0.context",
        documents=[{"text": "x", "context": "full"}],
    ),
    chat("257 documents", "documents", documents=[{"text": "x"}] * 257),
    chat("a document longer than the context", None, documents=[{"text": "word " * 50_000}]),
    chat(
        "a document part without text",
        "messages.0.content.0",
        messages=_user([{"type": "document"}]),
    ),
]

OTHERS = [
    completion("no prompt", "prompt", prompt=None),
    completion("no prompts", "prompt", prompt=[]),
    completion("an empty list of tokens", "prompt.0", prompt=[[]]),
    completion("negative tokens", None, prompt=[-1, -2]),
    completion("tokens beyond the vocabulary", None, prompt=[10**9]),
    completion("a token of 2^80", None, prompt=[2**80]),
    completion("tokens that are fractions", "prompt.0", prompt=[1.5]),
    completion("tokens and texts mixed", "prompt.1", prompt=[1, "x"]),
    completion("65 prompts", "prompt", prompt=["x"] * 65),
    completion("prompt logprobs in a stream", None, stream=True, prompt_logprobs=1),
    completion("a suffix", "suffix", suffix="x"),
    completion("too many tokens", None, prompt=[5] * 5000),
    register("a document without text", "text"),
    register("an empty text", None, text=""),
    register("a collection that holds a number", "text.1", text=["x", 5]),
    register("a path as an id", "id", id="../x", text="x"),
    register("an id with a line break", "id", id="x\ny", text="x"),
    register("an id of 200 characters", "id", id="x" * 200, text="x"),
    register("a document for an unknown model", "model", 404, text="x", model="gpt-7"),
    register("a document with an unknown field", "color", text="x", color="red"),
    register("registering in the context of a prompt", None, text="x", context="prompt"),
    register("a stream without waiting", None, text="x", stream=True, wait=False),
    visit("reading an unknown document", "GET", f"{DOCUMENTS}/nothing", 404),
    visit("reading a document by a path", "GET", f"{DOCUMENTS}/..%2f..%2fetc%2fpasswd", 404),
    visit("deleting an unknown document", "DELETE", f"{DOCUMENTS}/nothing", 404),
    visit("pinning an unknown document", "POST", f"{DOCUMENTS}/nothing/pin", 404),
    visit("unpinning an unknown document", "DELETE", f"{DOCUMENTS}/nothing/pin", 404),
    visit("reading an unknown model", "GET", "/v1/models/gpt-7", 404, "model"),
    visit("an unknown path", "GET", "/v1/nothing", 404),
    visit("a method that a path does not take", "PUT", CHAT, 405),
    visit("a file above the page's folder", "GET", "/static/..%2f__init__.py", 404),
    raw("tokenizing nothing", b"{}", path="/tokenize"),
    raw(
        "tokenizing two things",
        json.dumps({"prompt": "x", "messages": _user("x")}).encode(),
        path="/tokenize",
    ),
]

BAD_INPUTS = [*BODIES, *CHATS, *OTHERS]


def table() -> str:
    """The table as Markdown, with one row per endpoint and status."""
    names: dict[tuple[str, int], list[str]] = {}
    for bad in BAD_INPUTS:
        names.setdefault((f"{bad.method} {bad.path}", bad.status), []).append(bad.name)
    rows = [f"| `{where}` | {status} | {'; '.join(n)} |" for (where, status), n in names.items()]
    return "\n".join(["| endpoint | status | requests |", "|---|---|---|", *rows])
