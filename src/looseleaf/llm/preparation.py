"""The preparation of requests in threads: prompts become tokens, and grammars are compiled.

Salts share these threads fairly, so that the slow work of a salt does not delay other salts.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from looseleaf.engine.engine import Engine
from looseleaf.engine.sampling.grammar import Compiled
from looseleaf.errors import DeadlineExceeded
from looseleaf.models.tokenizer.tokenizer import LONG_TEXT, Tokenizer
from looseleaf.prompt.builder import num_characters
from looseleaf.sampling_params import Grammar
from looseleaf.sandbox import FairThreads

P = ParamSpec("P")
T = TypeVar("T")

_GRAMMAR_THREADS = 3
# also the limit of sandbox processes, each with a tokenizer
_SANDBOX_THREADS = 4
# this number of short messages takes as long as one long text
_MANY_MESSAGES = 100


class PromptThreads:
    """The threads that make prompts, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        threads = min(32, (os.cpu_count() or 1) + 4) if tokenizer.is_bounded else _SANDBOX_THREADS
        self._turns = FairThreads(threads, "looseleaf-prompts")

    def is_quick(self, prompt: object) -> bool:
        """Whether a prompt or a conversation becomes tokens within a millisecond."""
        many = isinstance(prompt, list | tuple) and len(prompt) > _MANY_MESSAGES
        return self._tokenizer.is_bounded and not many and num_characters(prompt) < LONG_TEXT

    async def make(self, salt: str, make: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """The result of ``make``, such as a prompt. Raises EngineClosed."""
        return await self._turns.run(salt, make, *args, **named)

    def close(self) -> None:
        """Refuse waiting work, and end the processes of the tokenizer."""
        self._turns.close()
        for sandbox in self._tokenizer.sandboxes:
            sandbox.close()


class Preparation(PromptThreads):
    """The threads of one engine that make prompts, and the threads that compile grammars."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.tokenizer)
        self._grammars = engine.grammars
        self._grammar_turns = FairThreads(_GRAMMAR_THREADS, "looseleaf-grammars")

    async def compile(
        self, grammar: Grammar | None, salt: str, limit: float | None
    ) -> Compiled | None:
        """The compiled ``grammar``; None without a grammar.

        Raises DeadlineExceeded after ``limit`` seconds, EngineClosed, and the errors of
        `GrammarCompiler.compile`."""
        if grammar is None:
            return None
        grammars = self._grammars
        compiled = grammars.find(grammar, salt)
        if compiled is not None:
            return compiled
        due = math.inf if limit is None else time.monotonic() + limit
        try:
            async with asyncio.timeout(limit):
                return await self._grammar_turns.run(salt, grammars.compile, grammar, salt, due)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the grammar was not compiled within the request's deadline of {limit:g} s: "
                "simplify it, or ask again in a while"
            ) from error

    def close(self) -> None:
        """Refuse waiting work, and end the running processes."""
        self._grammar_turns.close()
        self._grammars.sandbox.close()
        super().close()
