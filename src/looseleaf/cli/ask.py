"""``looseleaf ask``: an answer to a question about documents."""

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
from looseleaf.cli.options import engine_options, explicit_options, require_tiers
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
    help="context in which documents are computed: the text before the first document (lead), "
    "nothing (alone), or everything before the document (prompt)",
)
@click.option(
    "--host",
    "hosted",
    is_flag=True,
    help="keep documents in host memory with a vector index for --select retrieval; they may be "
    "longer than the pool",
)
@MAX_TOKENS
@TEMPERATURE
@click.option("--show-reuse", is_flag=True, help="print the reused and computed tokens")
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
        raise InvalidRequest("the question is empty: give a question")
    hosted = _take_hosted(names, options)
    policies: Policies = {
        "fuse": take_fuse(options),
        "select": take_select(options),
        "revise": take_revise(options),
    }
    if (
        policies["fuse"] is None
        and {"canary_share", "canary_bound"} & explicit_options(options).keys()
    ):
        raise InvalidOption(
            "--canary-share and --canary-bound check the answers of --fuse: give --fuse too"
        )
    require_tiers(options)
    documents = read_documents(names, context)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    from looseleaf.llm.llm import LLM

    llm = LLM(**explicit_options(options))
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
    """Whether documents are hosted; removes the flag from ``options`` and sets their policy.

    Raises InvalidOption for options that hosting excludes, before the slow hosting begins."""
    if not options.pop("hosted"):
        if options["select_policy"] == "retrieval":
            raise InvalidOption("--select retrieval reads hosted documents: give --host too")
        return False
    if not names:
        raise InvalidOption("--host keeps documents in host memory: name a document with -d")
    options["select_policy"] = options["select_policy"] or "retrieval"
    if options["select_policy"] != "retrieval":
        raise InvalidOption(
            f"--host is for --select retrieval, not {options['policy']}: leave one of them out"
        )
    if set(options["selectors"]) - {"none"}:
        raise InvalidOption(
            "--fuse can't be combined with --host, because the index would return recomputed "
            "tokens: leave one of them out"
        )
    return True
