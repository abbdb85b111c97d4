"""Endpoints for models, tokens, health and metrics, and the playground's files."""

import asyncio
import time
from dataclasses import asdict
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from looseleaf import __version__
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.server.body import StrictRoute
from looseleaf.server.errors import ApiError
from looseleaf.server.protocol.answers import ERRORS
from looseleaf.server.protocol.service import (
    DetokenizeBody,
    DetokenizeRequest,
    HoldingsBody,
    ModelBody,
    ModelList,
    StateBody,
    TokenizeBody,
    TokenizerBody,
    TokenizeRequest,
    VersionBody,
)
from looseleaf.server.reference import reference_page
from looseleaf.server.routes.context import KEYED, TheCaller, TheService
from looseleaf.server.service import ServedModel, Service

keyed = APIRouter(route_class=StrictRoute, responses=ERRORS, dependencies=KEYED)
open_router = APIRouter()

_HOLDINGS_SECONDS = 0.5
"""Interval at which a waiting call for holdings looks for another version."""

Version = Annotated[
    str | None, Query(max_length=64, description="The version that the caller has.")
]
Wait = Annotated[float, Query(ge=0, le=60, description="Longest wait in seconds.")]

_MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".png": "image/png",
}


@keyed.get("/v1/models", response_model=ModelList, tags=["models"])
async def list_models(service: TheService) -> Response:
    """The served models: the same weights with different system prompts."""
    models = [_model(service, model) for model in service.models.values()]
    return JSONResponse({"object": "list", "data": models})


@keyed.get("/v1/models/{name:path}", response_model=ModelBody, tags=["models"])
async def get_model(name: str, service: TheService) -> Response:
    """One model."""
    return JSONResponse(_model(service, service.model(name)))


@keyed.post("/tokenize", response_model=TokenizeBody, tags=["models"])
async def tokenize(body: TokenizeRequest, service: TheService, caller: TheCaller) -> Response:
    """The tokens that the model reads for a prompt or a conversation."""
    model = service.model(body.model or service.base_model.name)
    maker, documents, due = service.prompts(caller), body.documents or [], service.due()
    text = body.prompt or ""
    if body.messages is not None:
        prompt = await service.prepare(
            caller, due, maker.chat, body.messages, documents, model.system_prompt
        )
    else:
        markers = body.markers
        if markers is None:
            # clients of other servers expect their markers to be read
            markers = body.add_special_tokens is not None and not documents
        prompt = await service.prepare(
            caller, due, maker.completion, text, documents, markers=markers
        )
    tokens = [token for part in prompt.parts for token in part.tokens]
    if body.add_special_tokens is False:
        tokens = _without_bos(tokens, text, service.llm.tokenizer)
    limit = service.llm.facts.max_model_len
    return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": limit})


@keyed.post("/detokenize", response_model=DetokenizeBody, tags=["models"])
async def detokenize(body: DetokenizeRequest, service: TheService, caller: TheCaller) -> Response:
    """The text of token ids, special tokens included."""
    service.model(body.model or service.base_model.name)
    tokenizer = service.llm.tokenizer
    beyond = [token for token in body.tokens if not 0 <= token <= tokenizer.last_token_id]
    if beyond:
        raise ApiError(
            400,
            f"tokens: the tokenizer has no token {beyond[0]}: its last is "
            f"{tokenizer.last_token_id}",
            param="tokens",
            code="invalid_value",
        )

    def decode() -> str:
        return tokenizer.decode(body.tokens, skip_special=False)

    return JSONResponse({"prompt": await service.prepare(caller, service.due(), decode)})


@keyed.get("/tokenizer_info", response_model=TokenizerBody, tags=["models"])
async def tokenizer_info(service: TheService) -> Response:
    """The special tokens and the chat template of the model."""
    tokenizer = service.llm.tokenizer
    special = {tokenizer.written(token): token for token in sorted(tokenizer.special_token_ids)}
    bos, ends = tokenizer.bos_token_id, sorted(tokenizer.eos_token_ids)
    template = tokenizer.chat_template_source() if tokenizer.has_chat_template else None
    return JSONResponse(
        {
            "vocab_size": tokenizer.vocab_size,
            "bos_token_id": bos,
            "bos_token": None if bos is None else tokenizer.written(bos),
            "eos_token_ids": ends,
            "eos_token": tokenizer.written(ends[0]) if ends else None,
            "special_tokens": special,
            "chat_template": template,
            "max_model_len": service.llm.facts.max_model_len,
        }
    )


@keyed.get("/version", response_model=VersionBody, tags=["server"])
async def version() -> Response:
    """The version of the server."""
    return JSONResponse({"version": __version__})


@keyed.get("/v1/holdings", response_model=HoldingsBody, tags=["server"])
async def holdings(service: TheService, after: Version = None, wait: Wait = 0.0) -> Response:
    """The documents that the server holds, for routers; it requires the operator's key.

    With `after`, the answer waits for another version, for at most `wait` seconds."""
    service.require_ready()
    end = time.monotonic() + wait
    summary = await service.with_deadline(service.llm.holdings())
    while summary.version == after and time.monotonic() < end and not service.draining:
        await asyncio.sleep(_HOLDINGS_SECONDS)
        summary = await service.with_deadline(service.llm.holdings())
    documents = None if summary.version == after else summary.documents
    return JSONResponse({"object": "holdings", **asdict(summary), "documents": documents})


@keyed.get("/metrics", tags=["server"], response_class=Response)
async def metrics(service: TheService) -> Response:
    """Prometheus metrics of all tenants; they require the operator's key."""
    content = await service.exposition()
    return Response(content, media_type=service.metrics.content_type)


@open_router.head("/health", include_in_schema=False)
@open_router.get(
    "/health", response_model=StateBody, responses={503: {"model": StateBody}}, tags=["server"]
)
async def health(service: TheService) -> Response:
    """Whether the engine runs: 503 after a failure, or while a step is stuck."""
    state = service.state
    alive = state in ("ready", "draining")
    return JSONResponse({"status": "ok" if alive else state}, 200 if alive else 503)


@open_router.head("/ready", include_in_schema=False)
@open_router.get(
    "/ready", response_model=StateBody, responses={503: {"model": StateBody}}, tags=["server"]
)
async def ready(service: TheService) -> Response:
    """Whether the server takes requests: 503 during shutdown."""
    state = service.state
    return JSONResponse({"status": state}, 200 if state == "ready" else 503)


@open_router.get("/", include_in_schema=False)
async def page() -> Response:
    """The playground."""
    return _static("index.html")


@open_router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """The API reference as HTML."""
    return HTMLResponse(reference_page(request.app.openapi()))


@open_router.get("/static/{name}", include_in_schema=False)
async def static(name: str) -> Response:
    """A file of the playground."""
    return _static(name)


def _static(name: str) -> Response:
    folder = files("looseleaf.server") / "static"
    known = {entry.name for entry in folder.iterdir() if entry.is_file()}
    media = _MEDIA.get(PurePosixPath(name).suffix)
    if name not in known or media is None:
        raise ApiError(404, "there is no such page", code="not_found")
    content = (folder / name).read_bytes()
    return Response(content, headers={"Content-Type": media, "Cache-Control": "no-cache"})


def _without_bos(tokens: list[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """``tokens`` of ``text`` without the BOS that precedes it."""
    bos = tokenizer.bos_token_id
    if bos is None or tokens[:1] != [bos] or text.startswith(tokenizer.written(bos)):
        return tokens
    return tokens[1:]


def _model(service: Service, model: ServedModel) -> dict[str, object]:
    prompt = model.system_prompt
    return {
        "id": model.name,
        "object": "model",
        "created": service.created,
        "owned_by": "looseleaf",
        "root": service.base_model.name,
        "max_model_len": service.llm.facts.max_model_len,
        "system_prompt_tokens": len(prompt.tokens) if prompt else 0,
    }
