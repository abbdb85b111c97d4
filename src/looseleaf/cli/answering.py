"""An answer on a terminal: a progress bar during prefill, the streamed text, the reuse report."""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

import click

from looseleaf.cli.signals import deferred_interrupt
from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.errors import InvalidOption
from looseleaf.llm.llm import LLM
from looseleaf.prompt.request import Document, Message, Policies, PromptParts
from looseleaf.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.progress import Progress


DOCUMENTS = click.option(
    "-d", "--document", "names", multiple=True, metavar="FILE",
    help="text file, folder of text files, or - for stdin; may be repeated",
)  # fmt: skip
SYSTEM = click.option("--system", help="system prompt, placed before the documents")


def _require_tokens(context: click.Context, parameter: click.Parameter, value: int) -> int:
    # 0 computes a prompt without an answer, which a command can't show
    if value < 1:
        raise InvalidOption(f"--max-tokens must be at least 1, not {value}")
    return value


MAX_TOKENS = click.option(
    "--max-tokens",
    default=256,
    show_default=True,
    callback=_require_tokens,
    help="most tokens of an answer",
)
TEMPERATURE = click.option(
    "--temperature", default=0.0, show_default=True, help="sampling temperature; 0: greedy decoding"
)


def build_prompt(llm: LLM, messages: Sequence[Message]) -> PromptParts:
    """The prompt by the chat template; without a template, all parts of the messages in order."""
    if llm.engine.tokenizer.has_chat_template:
        return llm.engine.prompts.from_messages(messages)
    parts: list[str | Document] = []
    for message in messages:
        content = message["content"]
        parts += [content] if isinstance(content, str) else content
    return llm.engine.prompts.from_parts(parts)


def tier_faults(llm: LLM) -> Counter[tuple[str, str]]:
    """Faults so far by tier and kind; ``skipped`` counts accesses avoided after many faults."""
    faults = Counter[tuple[str, str]]()
    for tier in llm.engine.snapshot().tiers:
        faults.update({(tier.name, kind): times for kind, times in tier.counters.faults.items()})
        faults[tier.name, "skipped"] += tier.counters.skipped
    return +faults


NO_DOCUMENT = "no document was given, so the answer comes from the model only; "


def reuse_report(
    output: RequestOutput,
    faults: Counter[tuple[str, str]],
    documents: Sequence[Document] = (),
) -> str:
    """The report of an answer: reuse, policies, tier faults, and ``documents`` that are part of the
    prompt's text."""
    lines = [
        f"{document.name}: text of this prompt, by --context prompt"
        for document in documents
        if document.context == "prompt"
    ]
    lines.append(str(output.reuse))
    lines += [str(report) for report in (output.select, output.revision) if report is not None]
    if faults:
        counts = (f"{tier}: {times} {kind}" for (tier, kind), times in sorted(faults.items()))
        lines.append(f"tiers failed: {'; '.join(counts)}")
    return "\n".join(lines)


def print_answer(
    llm: LLM,
    parts: PromptParts,
    params: SamplingParams,
    **policies: Unpack[Policies],
) -> RequestOutput:
    """Stream the answer to standard output, with a prefill progress bar on standard error.

    Raises KeyboardInterrupt between two steps of the engine."""
    printed = ""
    output: RequestOutput | None = None
    with _progress("tokens") as bar, deferred_interrupt() as check_interrupt:
        task = bar.add_task("reading", visible=False)

        def report(computed: int, total: int) -> None:
            check_interrupt()
            bar.update(task, completed=computed, total=total, visible=True)

        for output in llm.stream(parts, params, on_prefill=report, **policies):
            check_interrupt()
            if not printed:
                bar.stop()
            click.echo(output.text[len(printed) :], nl=False)
            sys.stdout.flush()
            printed = output.text
    click.echo()
    assert output is not None, "a request without an output raises"
    return output


def host_documents(llm: LLM, documents: Sequence[Document], system: str | None) -> None:
    """Host documents after the lead of a conversation, with a bar on standard error."""
    with _progress("done") as bar:
        for document in documents:
            task = bar.add_task(str(document.name))

            def update(stage: str, completed: int, total: int, task: Any = task) -> None:
                bar.update(task, description=stage, completed=completed, total=total)

            llm.host(document, system=system, on_progress=update)


def _progress(unit: str) -> "Progress":
    """Progress bars on standard error in ``unit``; disabled outside of terminals, where they would
    print empty lines."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed}}/{{task.total}} {unit}"),
    )
    console = Console(stderr=True)
    return Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
