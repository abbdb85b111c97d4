"""One answer on a terminal: progress while documents are computed, text as it comes, the reuse
report.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

import click

from looseleaf.engine.reports.outputs import RequestOutput
from looseleaf.llm.llm import LLM
from looseleaf.prompt.request import Document, Message, Policies, PromptParts
from looseleaf.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.progress import Progress


DOCUMENTS = click.option(
    "-d", "--document", "names", multiple=True, metavar="FILE",
    help="a text file, a folder of them, or - for stdin",
)  # fmt: skip
SYSTEM = click.option("--system", help="a system prompt, read before the documents")
MAX_TOKENS = click.option("--max-tokens", default=256, show_default=True, help="longest answer")
TEMPERATURE = click.option(
    "--temperature", default=0.0, show_default=True, help="0 takes the likeliest words"
)


def build_prompt(llm: LLM, messages: Sequence[Message]) -> PromptParts:
    """By the chat template; for a base model without one, the parts of all messages in a row."""
    if llm.engine.tokenizer.has_chat_template:
        return llm.engine.prompts.from_messages(messages)
    parts: list[str | Document] = []
    for message in messages:
        content = message["content"]
        parts += [content] if isinstance(content, str) else content
    return llm.engine.prompts.from_parts(parts)


def tier_faults(llm: LLM) -> Counter[tuple[str, str]]:
    """How often each tier failed so far, by its name and how; ``skipped`` was not tried, because
    it had failed too often."""
    found = Counter[tuple[str, str]]()
    for tier in llm.engine.snapshot().tiers:
        found.update({(tier.name, kind): times for kind, times in tier.counters.faults.items()})
        found[tier.name, "skipped"] += tier.counters.skipped
    return +found


NO_DOCUMENT = "no document was given: the answer is the model's alone; "


def reuse_report(
    output: RequestOutput,
    faults: Counter[tuple[str, str]],
    documents: Sequence[Document] = (),
) -> str:
    """What was reused and what was computed, by which policies, and which tiers failed meanwhile,
    if any did. Of the ``documents`` those that are text of the prompt are named, too."""
    lines = [
        f"{document.name}: text of this prompt, by --context prompt"
        for document in documents
        if document.context == "prompt"
    ]
    lines.append(str(output.reuse))
    lines += [str(one) for one in (output.select, output.revision) if one is not None]
    if faults:
        told = (f"{tier}: {times} {kind}" for (tier, kind), times in sorted(faults.items()))
        lines.append(f"tiers failed: {'; '.join(told)}")
    return "\n".join(lines)


def print_answer(
    llm: LLM,
    parts: PromptParts,
    params: SamplingParams,
    **policies: Unpack[Policies],
) -> RequestOutput:
    """Stream the answer to standard output, with a bar on standard error before the first word."""
    shown = ""
    output: RequestOutput | None = None
    with _progress("tokens") as bar:
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


def host_documents(llm: LLM, documents: Sequence[Document], system: str | None) -> None:
    """Host documents behind the beginning of a conversation, with a bar on standard error."""
    with _progress("done") as bar:
        for document in documents:
            task = bar.add_task(str(document.name))

            def told(stage: str, done: int, total: int, task: Any = task) -> None:
                bar.update(task, description=stage, completed=done, total=total)

            llm.host(document, system=system, on_progress=told)


def _progress(unit: str) -> "Progress":
    """Bars on standard error that count in ``unit``; where nobody looks they would leave empty
    lines, so there are none."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed}}/{{task.total}} {unit}"),
    )
    console = Console(stderr=True)
    seen = console.is_terminal
    return Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not seen
    )
