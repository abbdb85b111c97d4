"""``/v1/chat/completions`` and ``/v1/completions``."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import get_args

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from looseleaf.config import Reuse
from looseleaf.sampling_params import SamplingParams
from looseleaf.server.answer import Answer, ChatForm, CompletionForm, Form
from looseleaf.server.body import StrictRoute
from looseleaf.server.connection import EventStream, until_gone
from looseleaf.server.errors import ApiError
from looseleaf.server.events import Event
from looseleaf.server.generation import Generation
from looseleaf.server.policies import parse_policies
from looseleaf.server.prompts import TokenizedPrompt
from looseleaf.server.protocol.answers import ERRORS, ChatCompletion, Completion
from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.protocol.common import GenerationRequest
from looseleaf.server.protocol.completion import CompletionRequest
from looseleaf.server.routes.context import (
    KEYED,
    TheService,
    caller_of,
    log_reuse,
    report_error,
    request_id_of,
    service_of,
)
from looseleaf.server.sampling import chat_params, completion_params
from looseleaf.server.schema_limits import require_small
from looseleaf.server.service import Service
from looseleaf.server.tools.choice import (
    reader_factory,
    shows_markers,
    template_variables,
    tool_grammar,
)

_MIN_SECONDS = 0.001

REUSE_HEADER = "X-Looseleaf-Reuse"
"""Prompt tokens of an answer: exact, reused out of context, and computed."""

router = APIRouter(prefix="/v1", route_class=StrictRoute, responses=ERRORS, dependencies=KEYED)


@router.post("/chat/completions", response_model=ChatCompletion, tags=["generation"])
async def chat_completions(body: ChatRequest, request: Request, service: TheService) -> Response:
    """Answer a conversation, with documents or without."""
    _log_user(request, body)
    model = service.model(body.model)
    documents = body.documents or []
    num_inline = sum(
        part.type == "document"
        for message in body.messages
        if isinstance(message.content, list)
        for part in message.content
    )
    _check_documents(service, len(documents) + num_inline)
    tokenizer = service.llm.tokenizer
    params = chat_params(
        body,
        tokenizer.vocab_size,
        service.advice,
        tool_grammar=tool_grammar(body, tokenizer, service.config),
        shows_markers=shows_markers(body, tokenizer, service.config),
    )
    require_small(params.grammar, service.config)
    caller, due = caller_of(request), _due(body, service)
    maker = service.prompts(caller, body.cache_salt, _reuse(service, body))
    prompt = await service.prepare(
        caller,
        due,
        maker.chat,
        body.messages,
        documents,
        model.system_prompt,
        **template_variables(body, tokenizer),
    )
    make_reader = reader_factory(body, tokenizer, prompt.parts[-1].tokens, service.config)
    form = ChatForm(tokenizer, body.top_logprobs or 0, make_reader, num_scores=body.prompt_logprobs)
    generation = _generation(request, body, [prompt], params, due)
    return await _answer(request, body, generation, form)


@router.post("/completions", response_model=Completion, tags=["generation"])
async def completions(body: CompletionRequest, request: Request, service: TheService) -> Response:
    """Continue raw prompts, after their documents. The server adds no system prompt."""
    _log_user(request, body)
    service.model(body.model)
    documents = body.documents or []
    _check_documents(service, len(documents))
    if len(body.prompts) > service.config.max_completions:
        raise ApiError(
            400,
            f"the request has {len(body.prompts)} prompts: send at most "
            f"{service.config.max_completions}",
            param="prompt",
            code="too_many_outputs",
        )
    tokenizer = service.llm.tokenizer
    params = completion_params(body, tokenizer.vocab_size, service.advice)
    require_small(params.grammar, service.config)
    caller, due = caller_of(request), _due(body, service)
    maker = service.prompts(caller, body.cache_salt, _reuse(service, body))
    prompts = [
        await service.prepare(caller, due, maker.completion, prompt, documents)
        for prompt in body.prompts
    ]
    form = CompletionForm(
        tokenizer, body.logprobs or 0, echoes=bool(body.echo), num_scores=body.prompt_logprobs
    )
    # the default limit never refuses a long prompt
    shortens = body.max_tokens is None
    generation = _generation(request, body, prompts, params, due, shortens=shortens)
    return await _answer(request, body, generation, form)


def _log_user(request: Request, body: GenerationRequest) -> None:
    """Add the ``user`` field to the log, also for requests refused later."""
    if body.user is not None:
        request.state.facts["user"] = body.user


def _check_documents(service: Service, number: int) -> None:
    limit = service.config.max_documents
    if number > limit:
        raise ApiError(
            400,
            f"the request has {number} documents, above the limit of {limit}: send fewer",
            param="documents",
            code="too_many_documents",
        )


def _reuse(service: Service, body: GenerationRequest) -> Reuse:
    """The most reuse of a request: the lesser of its own and the server's level.

    Discovery is off for scored prompts, whose documents have no scores, and for APE, which permits
    no text between documents."""
    levels = get_args(Reuse)
    wanted = None if body.looseleaf is None else body.looseleaf.reuse
    level = min(wanted or service.config.reuse, service.config.reuse, key=levels.index)
    selector = body.fuse if body.fuse is None or isinstance(body.fuse, str) else body.fuse.selector
    if level == "discover" and (body.prompt_logprobs is not None or selector == "ape"):
        return "documents"
    return level


def _due(body: GenerationRequest, service: Service) -> float:
    """The request's deadline, on the loop's clock."""
    limit = service.config.deadline
    seconds = limit if body.deadline is None else min(body.deadline, limit)
    return asyncio.get_running_loop().time() + seconds


def _generation(
    request: Request,
    body: GenerationRequest,
    prompts: list[TokenizedPrompt],
    params: SamplingParams,
    due: float,
    *,
    shortens: bool = False,
) -> Generation:
    # tokenization has used a part of the request's time
    seconds = max(round(due - asyncio.get_running_loop().time(), 3), _MIN_SECONDS)
    return Generation(
        service_of(request),
        request_id_of(request),
        caller_of(request).salted(body.cache_salt),
        prompts,
        params,
        seconds,
        parse_policies(body),
        shortens,
    )


async def _answer(
    request: Request, body: GenerationRequest, generation: Generation, form: Form
) -> Response:
    options = body.stream_options
    usage = bool(body.stream and options is not None and options.include_usage)
    along = usage and bool(options and options.continuous_usage_stats)
    with_ids = bool(body.return_token_ids)
    answer = Answer(generation, form, body.model, usage, with_ids, along)
    try:
        if not body.stream:
            content = await until_gone(request.receive, answer.whole())
            return JSONResponse(content, headers={REUSE_HEADER: answer.reuse_header})
        chunks = answer.chunks()
        # errors before the first token can still set the status
        first = await until_gone(request.receive, anext(chunks))
        events = _guarded(first, chunks, request, generation)
        return EventStream(events, {REUSE_HEADER: answer.reuse_header})
    finally:
        if not body.stream:
            log_reuse(request, generation)


async def _guarded(
    first: list[Event],
    chunks: AsyncGenerator[list[Event], None],
    request: Request,
    generation: Generation,
) -> AsyncGenerator[list[Event], None]:
    """The stream; an error becomes its last event."""
    try:
        async with aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk
    except Exception as error:
        yield [report_error(request, error).body]
    finally:
        log_reuse(request, generation)
