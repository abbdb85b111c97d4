"""``looseleaf chat``: a conversation about documents in the terminal."""

from collections import Counter
from typing import Any

import click

from looseleaf.cli.answering import (
    DOCUMENTS,
    MAX_TOKENS,
    NO_DOCUMENT,
    SYSTEM,
    TEMPERATURE,
    build_prompt,
    print_answer,
    reuse_report,
    tier_faults,
)
from looseleaf.cli.documents import read_documents
from looseleaf.cli.options import engine_options, explicit_options, flag, require_tiers
from looseleaf.errors import LooseleafError
from looseleaf.prompt.request import Document
from looseleaf.sampling_params import SamplingParams

HELP = (
    "/add FILE: add a document   /docs: list documents   /reuse: last report   "
    "/new: new conversation   /quit"
)
_QUIT = ("/quit", "/exit", "quit", "exit")


@click.command()
@DOCUMENTS
@SYSTEM
@MAX_TOKENS
@TEMPERATURE
@engine_options
def chat(
    names: tuple[str, ...], system: str | None, max_tokens: int, temperature: float, **options: Any
) -> None:
    """Chat about documents. Each document is computed once for all questions."""
    require_tiers(options)
    documents = read_documents(names)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    from looseleaf.llm.llm import LLM

    llm = LLM(**explicit_options(options))
    click.echo(HELP)
    click.echo(str(llm.engine.threads), err=True)
    Conversation(llm, system, documents, params).run()


class Conversation:
    """A conversation. New documents join the next question, so that earlier turns stay cached."""

    def __init__(
        self, llm: Any, system: str | None, documents: list[Document], params: SamplingParams
    ) -> None:
        self._llm, self._system, self._params = llm, system, params
        self._documents = list(documents)
        self._new = list(documents)
        self._turns: list[dict[str, Any]] = []
        self._report = "no answer yet"
        # tier faults up to the last answer
        self._faults = Counter[tuple[str, str]]()

    def run(self) -> None:
        """Read lines until /quit, exit or the end of the input; Ctrl-C ends only an answer."""
        while True:
            try:
                line = click.prompt(">", prompt_suffix=" ", default="", show_default=False).strip()
            except (click.Abort, EOFError):
                click.echo()
                return
            if line.lower() in _QUIT:
                return
            try:
                self._command(line) if line.startswith("/") else self._ask(line)
            except LooseleafError as error:
                click.echo(f"looseleaf: {error.named(flag)}", err=True)
            except KeyboardInterrupt:
                click.echo("\nstopped: this answer is not part of the conversation", err=True)

    def _command(self, line: str) -> None:
        word, _, argument = line.partition(" ")
        if word == "/add" and argument:
            new = read_documents([argument.strip()])
            self._documents += new
            self._new += new
            click.echo(f"added {', '.join(str(d.name) for d in new)}")
        elif word == "/docs":
            click.echo(
                "\n".join(f"{d.name}: {sum(map(len, d.texts))} characters" for d in self._documents)
                or "none"
            )
        elif word == "/reuse":
            click.echo(self._report)
        elif word == "/new":
            self._turns, self._new = [], list(self._documents)
        else:
            click.echo(HELP)

    def _ask(self, question: str) -> None:
        if not question:
            return
        turn = {"role": "user", "content": [*self._new, question]}
        system = [{"role": "system", "content": self._system}] if self._system else []
        output = print_answer(
            self._llm, build_prompt(self._llm, [*system, *self._turns, turn]), self._params
        )
        if not self._documents:
            click.echo(f"{NO_DOCUMENT}add one with /add FILE", err=True)
        # after the answer, so that a failed question is not part of the conversation
        self._turns += [turn, {"role": "assistant", "content": output.text}]
        self._new = []
        faults = tier_faults(self._llm)
        self._report = reuse_report(output, faults - self._faults, self._documents)
        self._faults = faults
