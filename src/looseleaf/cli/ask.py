"""``looseleaf ask``: one question about some documents."""

from typing import Any

import click

from looseleaf.cli.answering import (
    DOCUMENTS,
    MAX_TOKENS,
    NO_DOCUMENT,
    SYSTEM,
    TEMPERATURE,
    build_prompt,
    host_documents,
    print_answer,
    reuse_report,
    tier_faults,
)
from looseleaf.cli.documents import read_documents
from looseleaf.cli.options import engine_options, given, require_tiers
from looseleaf.cli.policies import (
    fuse_options,
    select_options,
    take_fuse,
    take_revise,
    take_select,
)
from looseleaf.errors import InvalidOption, InvalidRequest
from looseleaf.prompt.request import Policies
from looseleaf.sampling_params import SamplingParams


@click.command()
@click.argument("question")
@DOCUMENTS
@SYSTEM
@click.option(
    "--context",
    type=click.Choice(["lead", "alone", "prompt"]),
    default="lead",
    show_default=True,
    help="what a document sees when it is computed: the text before the first document, nothing, "
    "or all before it",
)
@click.option(
    "--host",
    "hosted",
    is_flag=True,
    help="keep documents in the host's memory behind an index, which --select retrieval reads: "
    "they may be longer than the pool",
)
@MAX_TOKENS
@TEMPERATURE
@click.option("--show-reuse", is_flag=True, help="say what was computed and what was reused")
@fuse_options(several=False)
@select_options
@engine_options
def ask(
    question: str,
    names: tuple[str, ...],
    system: str | None,
    context: Any,
    max_tokens: int,
    temperature: float,
    show_reuse: bool,
    **options: Any,
) -> None:
    """Answer QUESTION from documents."""
    if not question.strip():
        raise InvalidRequest("the question is empty: ask something")
    hosted = _take_hosted(names, options)
    policies: Policies = {
        "fuse": take_fuse(options),
        "select": take_select(options),
        "revise": take_revise(options),
    }
    if policies["fuse"] is None and {"canary_share", "canary_bound"} & given(options).keys():
        raise InvalidOption(
            "--canary-share and --canary-bound check what --fuse does: give that too"
        )
    require_tiers(options)
    documents = read_documents(names, context)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    from looseleaf.llm.llm import LLM

    llm = LLM(**given(options))
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": [*documents, question]})
    if hosted:
        host_documents(llm, documents, system)
    output = print_answer(llm, build_prompt(llm, messages), params, **policies)
    if not documents:
        click.echo(f"{NO_DOCUMENT}name files or folders with -d", err=True)
    if show_reuse:
        click.echo(reuse_report(output, tier_faults(llm), documents), err=True)
        click.echo(str(llm.engine.threads), err=True)


def _take_hosted(names: tuple[str, ...], options: dict[str, Any]) -> bool:
    """Whether documents are hosted, and then read by their index; takes the flag out of
    ``options``. Raises InvalidOption where that has no meaning: before they are, which takes long.
    """
    if not options.pop("hosted"):
        if options["policy"] == "retrieval":
            raise InvalidOption("--select retrieval reads hosted documents: give --host too")
        return False
    if not names:
        raise InvalidOption("--host keeps documents in the host's memory: name a document with -d")
    options["policy"] = options["policy"] or "retrieval"
    if options["policy"] != "retrieval":
        raise InvalidOption(
            f"--host is for --select retrieval, not {options['policy']}: leave one of them out"
        )
    if set(options["selectors"]) - {"none"}:
        raise InvalidOption(
            "--fuse can't be combined with --host, whose index would find what is computed again: "
            "leave one of them out"
        )
    return True
