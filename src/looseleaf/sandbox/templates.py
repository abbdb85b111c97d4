"""Jinja templates: compile, render, and the job that renders in a process of its own."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from looseleaf.errors import CorruptCheckpoint, InvalidRequest

# ten times the longest of any model; Jinja takes seconds and gigabytes for some that are longer
_MOST_CHARACTERS = 1 << 18


def make(setup: dict[str, Any]) -> Callable[[dict[str, Any]], str]:
    """The job of a template: its ``source`` is the setup, a request its variables."""
    rendering = compile_template(setup["source"])
    return lambda variables: render(rendering, variables)


def render(rendering: Callable[..., str], variables: dict[str, Any]) -> str:
    """The text of a conversation. Raises InvalidRequest if the template can't write it."""
    from jinja2.exceptions import TemplateError

    try:
        return rendering(**variables)
    except TemplateError as error:
        raise InvalidRequest(
            f"this model's chat template refuses the conversation: {error}"
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        # a template may divide by zero, look for what is not there, ask for a long range …
        raise InvalidRequest(
            f"this model's chat template can't render the conversation: {error!r}"
        ) from error


def make_environment() -> Any:
    """The Jinja environment that all chat templates have."""
    from jinja2 import pass_context
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _generation_tag()],
        # or constants such as {{ "x" * 10**10 }} are computed while the checkpoint loads; what
        # asks for the context can't be
        optimized=False,
        finalize=pass_context(lambda context, value: value),
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def parse_template(source: str) -> Any:
    """The syntax tree of ``source``. Raises CorruptCheckpoint."""
    if len(source) > _MOST_CHARACTERS:
        raise CorruptCheckpoint(
            f"the chat template has {len(source)} characters, and {_MOST_CHARACTERS} are the most "
            "that are read; download it again"
        )
    try:
        return make_environment().parse(source)
    except Exception as error:
        raise _invalid(error) from error


def compile_template(source: str) -> Callable[..., str]:
    """The function that renders ``source`` from named variables. Raises CorruptCheckpoint."""
    parse_template(source)
    try:
        rendering: Callable[..., str] = make_environment().from_string(source).render
    except Exception as error:
        raise _invalid(error) from error
    return rendering


def _invalid(error: Exception) -> CorruptCheckpoint:
    # beside Jinja's own, Python's on the way through what Jinja made of it: loops that are
    # left outside of one, names that stand twice, expressions nested too deep
    from jinja2 import TemplateSyntaxError

    line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
    return CorruptCheckpoint(
        f"the chat template is not valid Jinja ({line}{error}); fix it in "
        "chat_template.jinja or tokenizer_config.json"
    )


def _generation_tag() -> Any:
    """The tag that marks assistant text for training; here it renders what is inside."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return GenerationTag


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which is not what models were trained on
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})


def _raise(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
