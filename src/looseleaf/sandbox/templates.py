"""Jinja chat templates: compilation, rendering, and the sandbox job that renders."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from looseleaf.errors import CorruptCheckpoint, InvalidRequest

# ten times the longest known template; Jinja may take gigabytes for longer ones
_MAX_CHARACTERS = 1 << 18


def make(setup: dict[str, Any]) -> Callable[[dict[str, Any]], str]:
    """The job of a template: ``setup`` has its ``source``, a request its variables."""
    template = compile_template(setup["source"])
    return lambda variables: render(template, variables)


def render(template: Callable[..., str], variables: dict[str, Any]) -> str:
    """The text of a conversation. Raises InvalidRequest if the template fails."""
    from jinja2.exceptions import TemplateError

    try:
        return template(**variables)
    except TemplateError as error:
        raise InvalidRequest(
            f"this model's chat template refuses the conversation: {error}"
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        # templates may raise arbitrary errors, such as a division by zero
        raise InvalidRequest(
            f"this model's chat template can't render the conversation: {error!r}"
        ) from error


def make_environment() -> Any:
    """The Jinja environment of all chat templates."""
    from jinja2 import pass_context
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _generation_tag()],
        # prevents constant folding of {{ "x" * 10**10 }} at load; Jinja never folds expressions
        # whose finalize needs the context
        optimized=False,
        finalize=pass_context(lambda context, value: value),
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def parse_template(source: str) -> Any:
    """The syntax tree of ``source``. Raises CorruptCheckpoint."""
    if len(source) > _MAX_CHARACTERS:
        raise CorruptCheckpoint(
            f"the chat template has {len(source)} characters, above the limit of "
            f"{_MAX_CHARACTERS}; download it again"
        )
    try:
        return make_environment().parse(source)
    except Exception as error:
        raise _invalid(error) from error


def compile_template(source: str) -> Callable[..., str]:
    """The function that renders ``source`` from keyword variables. Raises CorruptCheckpoint."""
    parse_template(source)
    try:
        template: Callable[..., str] = make_environment().from_string(source).render
    except Exception as error:
        raise _invalid(error) from error
    return template


def _invalid(error: Exception) -> CorruptCheckpoint:
    # Jinja's generated Python may be invalid too, such as a break outside of a loop
    from jinja2 import TemplateSyntaxError

    line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
    return CorruptCheckpoint(
        f"the chat template is not valid Jinja ({line}{error}); fix it in "
        "chat_template.jinja or tokenizer_config.json"
    )


def _generation_tag() -> Any:
    """The tag that marks assistant text for training; it renders its body."""
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
    # models are not trained on Jinja's HTML escapes
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})


def _raise(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
