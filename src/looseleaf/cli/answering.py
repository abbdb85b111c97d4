"""One answer on a terminal: progress while documents are computed, text as it comes, the reuse
report.
"""

import sys
from collections.abc import Sequence
from typing import Unpack

import click

from looseleaf.engine.llm import LLM
from looseleaf.engine.outputs import RequestOutput
from looseleaf.engine.request import Document, Message, Policies, PromptParts
from looseleaf.sampling_params import SamplingParams


def build_prompt(llm: LLM, messages: Sequence[Message]) -> PromptParts:
    """By the chat template; for a base model without one, the parts of all messages in a row."""
    if llm.engine.tokenizer.has_chat_template:
        return llm.engine.prompts.from_messages(messages)
    parts: list[str | Document] = []
    for message in messages:
        content = message["content"]
        parts += [content] if isinstance(content, str) else content
    return llm.engine.prompts.from_parts(parts)


def print_answer(
    llm: LLM,
    parts: PromptParts,
    params: SamplingParams,
    **policies: Unpack[Policies],
) -> RequestOutput:
    """Stream the answer to standard output, with a bar on standard error before the first word."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    shown = ""
    output: RequestOutput | None = None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} tokens"),
    )
    console = Console(stderr=True)
    # where nobody looks a bar would leave empty lines
    seen = console.is_terminal
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not seen
    ) as bar:
        task = bar.add_task("reading")
        for output in llm.stream(
            parts,
            params,
            on_prefill=lambda done, total: bar.update(task, completed=done, total=total),
            **policies,
        ):
            if not shown:
                bar.stop()
            click.echo(output.text[len(shown) :], nl=False)
            sys.stdout.flush()
            shown = output.text
    click.echo()
    assert output is not None, "a request that ends without an output raises"
    return output
