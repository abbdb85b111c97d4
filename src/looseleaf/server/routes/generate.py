"""``/v1/chat/completions`` and ``/v1/completions``."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from looseleaf.sampling_params import SamplingParams
from looseleaf.server.answer import Answer, ChatForm, CompletionForm, Form, Json
from looseleaf.server.body import StrictRoute
from looseleaf.server.connection import EventStream, until_gone
from looseleaf.server.errors import ApiError
from looseleaf.server.generation import Generation
from looseleaf.server.policies import take_policies
from looseleaf.server.prompts import MadePrompt
from looseleaf.server.protocol.answers import ERRORS, ChatCompletion, Completion
from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.protocol.common import GenerationRequest
from looseleaf.server.protocol.completion import CompletionRequest
from looseleaf.server.routes.context import (
    KEYED,
    TheService,
    caller_of,
    note,
    request_id_of,
    service_of,
    tell,
)
from looseleaf.server.sampling import chat_params, completion_params
from looseleaf.server.schema_limits import require_small
from looseleaf.server.service import Service

_LEAST_SECONDS = 0.001

router = APIRouter(prefix="/v1", route_class=StrictRoute, responses=ERRORS, dependencies=KEYED)


@router.post("/chat/completions", response_model=ChatCompletion, tags=["generation"])
async def chat_completions(body: ChatRequest, request: Request, service: TheService) -> Response:
    """Answer a conversation, from documents if there are any."""
    _name_user(request, body)
    model = service.model(body.model)
    documents = body.documents or []
    inside = sum(
        part.type == "document"
        for message in body.messages
        if not isinstance(message.content, str)
        for part in message.content
    )
    _check_documents(service, len(documents) + inside)
    engine = service.llm.engine
    params = chat_params(body, engine.tokenizer.vocab_size, service.advice)
    require_small(params.grammar, service.config)
    caller, due = caller_of(request), _due(body, service)
    maker = service.prompts(caller)
    messages, prompt = body.messages, model.system_prompt
    made = await service.prepare(caller, due, maker.chat, messages, documents, prompt)
    form = ChatForm(engine.tokenizer, body.top_logprobs or 0)
    generation = _generation(request, body, [made], params, due)
    return await _answer(request, body, generation, form)


@router.post("/completions", response_model=Completion, tags=["generation"])
async def completions(body: CompletionRequest, request: Request, service: TheService) -> Response:
    """Continue raw prompts, behind documents if there are any. No system prompt is added."""
    _name_user(request, body)
    service.model(body.model)
    documents = body.documents or []
    _check_documents(service, len(documents))
    prompts = body.prompts
    if len(prompts) > service.config.max_completions:
        raise ApiError(
            400,
            f"{len(prompts)} prompts are too many: send at most {service.config.max_completions}",
            param="prompt",
            code="too_many_outputs",
        )
    engine = service.llm.engine
    params = completion_params(body, engine.tokenizer.vocab_size, service.advice)
    require_small(params.grammar, service.config)
    caller, due = caller_of(request), _due(body, service)
    maker = service.prompts(caller)
    made = [await service.prepare(caller, due, maker.completion, one, documents) for one in prompts]
    form = CompletionForm(engine.tokenizer, body.logprobs or 0)
    # a limit that nobody has asked for is no reason to refuse a long prompt
    shortens = body.max_tokens is None
    generation = _generation(request, body, made, params, due, shortens=shortens)
    return await _answer(request, body, generation, form)


def _name_user(request: Request, body: GenerationRequest) -> None:
    """Whom the caller asks for, for the log: also of what is refused from here on."""
    if body.user is not None:
        request.state.facts["user"] = body.user


def _check_documents(service: Service, number: int) -> None:
    most = service.config.max_documents
    if number > most:
        raise ApiError(
            400,
            f"the request has {number} documents, but {most} are the most: leave some out",
            param="documents",
            code="too_many_documents",
        )


def _due(body: GenerationRequest, service: Service) -> float:
    """When the request must have ended, on the loop's clock."""
    most = service.config.deadline
    seconds = most if body.deadline is None else min(body.deadline, most)
    return asyncio.get_running_loop().time() + seconds


def _generation(
    request: Request,
    body: GenerationRequest,
    made: list[MadePrompt],
    params: SamplingParams,
    due: float,
    *,
    shortens: bool = False,
) -> Generation:
    # what making the prompt took is no longer there for the answer
    left = max(round(due - asyncio.get_running_loop().time(), 3), _LEAST_SECONDS)
    return Generation(
        service_of(request),
        request_id_of(request),
        caller_of(request),
        made,
        params,
        left,
        take_policies(body),
        shortens,
    )


async def _answer(
    request: Request, body: GenerationRequest, generation: Generation, form: Form
) -> Response:
    options = body.stream_options
    usage = bool(body.stream and options is not None and options.include_usage)
    answer = Answer(generation, form, body.model, usage)
    try:
        if not body.stream:
            return JSONResponse(await until_gone(request.receive, answer.whole()))
        chunks = answer.chunks()
        # the status is known with the first token: until then a refusal can be told as one
        first = await until_gone(request.receive, anext(chunks))
        return EventStream(_guarded(first, chunks, request, generation))
    finally:
        if not body.stream:
            note(request, generation)


async def _guarded(
    first: Json, chunks: AsyncGenerator[Json, None], request: Request, generation: Generation
) -> AsyncGenerator[Json, None]:
    """The stream from its first chunk on; an error in its middle is its last event."""
    try:
        async with aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk
    except Exception as error:
        yield tell(request, error).body
    finally:
        note(request, generation)
