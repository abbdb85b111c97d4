"""A chat request in the engine, for all endpoints whose requests are conversations."""

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request

from looseleaf.server.generation import Generation
from looseleaf.server.prompts import TokenizedPrompt
from looseleaf.server.protocol.chat import ChatRequest
from looseleaf.server.routes.common import (
    check_documents,
    due_of,
    log_user,
    make_generation,
    reuse_level,
)
from looseleaf.server.routes.context import caller_of, service_of
from looseleaf.server.sampling import chat_params
from looseleaf.server.schema_limits import require_small
from looseleaf.server.tools.choice import (
    reader_factory,
    shows_markers,
    template_variables,
    tool_grammar,
)
from looseleaf.server.tools.reader import AnswerReader


@dataclass(frozen=True)
class Chat:
    """A generation, and the reader of each of its outputs; None if outputs are content only."""

    generation: Generation
    make_reader: Callable[[], AnswerReader] | None

    def reader(self) -> AnswerReader:
        """A reader of one output."""
        return AnswerReader(None, None) if self.make_reader is None else self.make_reader()


async def begin_chat(request: Request, body: ChatRequest, *, shortens: bool = False) -> Chat:
    """The generation of a conversation. Raises ApiError for a request that can't be served.

    ``shortens`` lowers the limit of tokens to the room that the context leaves."""
    service = service_of(request)
    tokenizer = service.llm.tokenizer
    log_user(request, body.user)
    service.model(body.model)
    params = chat_params(
        body,
        tokenizer.vocab_size,
        service.advice,
        tool_grammar=tool_grammar(body, tokenizer, service.config),
        shows_markers=shows_markers(body, tokenizer, service.config),
    )
    require_small(params.grammar, service.config)
    due = due_of(body, service)
    prompt = await chat_prompt(request, body, due)
    make_reader = reader_factory(body, tokenizer, prompt.parts[-1].tokens, service.config)
    generation = make_generation(request, body, [prompt], params, due, shortens=shortens)
    return Chat(generation, make_reader)


async def chat_prompt(request: Request, body: ChatRequest, due: float) -> TokenizedPrompt:
    """The prompt of a conversation. Raises ApiError, and DeadlineExceeded at ``due``."""
    service, caller = service_of(request), caller_of(request)
    model = service.model(body.model)
    documents = body.documents or []
    num_inline = sum(
        part.type == "document"
        for message in body.messages
        if isinstance(message.content, list)
        for part in message.content
    )
    check_documents(service, len(documents) + num_inline)
    maker = service.prompts(caller, body.cache_salt, reuse_level(service, body))
    return await service.prepare(
        caller,
        due,
        maker.chat,
        body.messages,
        documents,
        model.system_prompt,
        **template_variables(body, service.llm.tokenizer),
    )
