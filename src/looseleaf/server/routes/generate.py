"""``/v1/chat/completions`` and ``/v1/completions``."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from looseleaf.server.answer import Answer, ChatForm, CompletionForm, Form
from looseleaf.server.body import StrictRoute
from looseleaf.server.errors import ApiError
from looseleaf.server.generation import Generation
from looseleaf.server.protocol.answers import ERRORS, ChatCompletion, Completion
from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.protocol.common import GenerationRequest
from looseleaf.server.protocol.completion import CompletionRequest
from looseleaf.server.routes.chat import begin_chat
from looseleaf.server.routes.common import (
    check_documents,
    due_of,
    log_user,
    make_generation,
    respond,
    reuse_level,
)
from looseleaf.server.routes.context import KEYED, TheService, caller_of
from looseleaf.server.sampling import completion_params
from looseleaf.server.schema_limits import require_small

router = APIRouter(prefix="/v1", route_class=StrictRoute, responses=ERRORS, dependencies=KEYED)


@router.post("/chat/completions", response_model=ChatCompletion, tags=["generation"])
async def chat_completions(body: ChatRequest, request: Request, service: TheService) -> Response:
    """Answer a conversation, with documents or without."""
    chat = await begin_chat(request, body)
    form = ChatForm(
        service.llm.tokenizer,
        body.top_logprobs or 0,
        chat.make_reader,
        num_scores=body.prompt_logprobs,
    )
    return await _answer(request, body, chat.generation, form)


@router.post("/completions", response_model=Completion, tags=["generation"])
async def completions(body: CompletionRequest, request: Request, service: TheService) -> Response:
    """Continue raw prompts, after their documents. The server adds no system prompt."""
    log_user(request, body.user)
    service.model(body.model)
    documents = body.documents or []
    check_documents(service, len(documents))
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
    caller, due = caller_of(request), due_of(body, service)
    maker = service.prompts(caller, body.cache_salt, reuse_level(service, body))
    prompts = [
        await service.prepare(caller, due, maker.completion, prompt, documents)
        for prompt in body.prompts
    ]
    form = CompletionForm(
        tokenizer, body.logprobs or 0, echoes=bool(body.echo), num_scores=body.prompt_logprobs
    )
    # the default limit never refuses a long prompt
    shortens = body.max_tokens is None
    generation = make_generation(request, body, prompts, params, due, shortens=shortens)
    return await _answer(request, body, generation, form)


async def _answer(
    request: Request, body: GenerationRequest, generation: Generation, form: Form
) -> Response:
    options = body.stream_options
    usage = bool(body.stream and options is not None and options.include_usage)
    along = usage and bool(options and options.continuous_usage_stats)
    with_ids = bool(body.return_token_ids)
    answer = Answer(generation, form, body.model, usage, with_ids, along)
    return await respond(request, answer, stream=bool(body.stream))
