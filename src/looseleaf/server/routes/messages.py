"""``/v1/messages``: Anthropic's API over the same chats."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from looseleaf.server.blocks import BlockAnswer, Blocks
from looseleaf.server.body import StrictRoute
from looseleaf.server.messages.form import MessageForm
from looseleaf.server.messages.translate import translate
from looseleaf.server.protocol.answers import ERRORS
from looseleaf.server.protocol.messages import (
    CountTokensRequest,
    MessageBody,
    MessageError,
    MessagesRequest,
    TokenCount,
)
from looseleaf.server.routes.chat import begin_chat, chat_prompt
from looseleaf.server.routes.common import due_of, log_user, respond
from looseleaf.server.routes.context import KEYED, TheService

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**error, "model": MessageError} for status, error in ERRORS.items()
}

router = APIRouter(
    prefix="/v1/messages",
    route_class=StrictRoute,
    responses=_ERRORS,
    dependencies=KEYED,
    tags=["generation"],
)


@router.post("", response_model=MessageBody)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation in the form of Anthropic's API."""
    user = (body.metadata or {}).get("user_id")
    log_user(request, user if isinstance(user, str) else body.user)
    chat = await begin_chat(request, translate(body), shortens=True)
    form = MessageForm(chat.generation, body.model)
    answer = BlockAnswer(chat.generation, Blocks(chat.reader()), form)
    return await respond(request, answer, stream=bool(body.stream))


@router.post("/count_tokens", response_model=TokenCount)
async def count_tokens(body: CountTokensRequest, request: Request, service: TheService) -> Response:
    """The tokens of a conversation's prompt. Nothing is generated."""
    translated = translate(body)
    prompt = await chat_prompt(request, translated, due_of(translated, service))
    return JSONResponse({"input_tokens": prompt.num_tokens})
