"""``looseleaf serve``: the OpenAI API over HTTP. Options come from flags, the environment and a
file, in this order; what none of them says has the configuration's default."""

import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from looseleaf.cli.options import ENGINE_SECTIONS, field_names, given, section_options
from looseleaf.cli.signals import end_at_once
from looseleaf.cli.startup import startup_bar
from looseleaf.cli.variables import PREFIX, leave_out_injected, require_known
from looseleaf.config import ServerConfig
from looseleaf.errors import InvalidOption, install

NEEDED = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "structlog", "llguidance")


def read_file(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Make the options of a TOML file the defaults of the command."""
    # before any other option is looked for
    leave_out_injected(option_names())
    require_known(option_names())
    if path is None:
        return
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidOption(f"the configuration {path} can't be read: {error}") from error
    known = option_names()
    # what a flag gives is checked as text; a file's numbers would lose their fractions
    whole = {one.name for one in context.command.params if one.type is click.INT}
    switches = {
        one.name
        for one in context.command.params
        if isinstance(one.type, click.types.BoolParamType)
    }
    for name, value in content.items():
        if name not in known:
            raise InvalidOption(f"{path}: unknown option {name!r}: looseleaf serve --help has all")
        if isinstance(value, dict) or (isinstance(value, list) and name != "system_prompt"):
            raise InvalidOption(f"{path}: {name} must be one value")
        if isinstance(value, float | bool) and name in whole:
            raise InvalidOption(f"{path}: {name} must be a whole number, not {value}")
        if not isinstance(value, bool) and name in switches:
            raise InvalidOption(f"{path}: {name} must be true or false, not {value!r}")
    context.default_map = content


def option_names() -> list[str]:
    """All options of the command, as a file names them."""
    return ["model", *field_names(ServerConfig, *ENGINE_SECTIONS)]


@click.command(context_settings={"auto_envvar_prefix": PREFIX})
@click.argument("model", required=False, envvar="LOOSELEAF_MODEL")
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    is_eager=True,
    expose_value=False,
    callback=read_file,
    help="TOML file of options, named as the flags are, with underscores",
)
@section_options(*ENGINE_SECTIONS, ServerConfig)
def serve(model: str | None, **options: Any) -> None:
    """Serve MODEL, a checkpoint folder, a hub id or looseleaf-reference-causal, over the OpenAI
    API. The default is the reference model looseleaf-reference.

    Every option can also be set as LOOSELEAF_NAME in the environment, or in the file of --config.
    """
    end_at_once()
    if find_spec("resource") is None:
        raise InvalidOption(
            "the server takes the signals and limits of Linux or macOS: on Windows, run it in WSL"
        )
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InvalidOption(f"serving needs {missing[0]}: {install('serve')}")
    from looseleaf.server.run import require_free
    from looseleaf.server.run import serve as run
    from looseleaf.server.service import make_service

    if model is not None and not model.strip():
        raise InvalidOption(
            "the name of the model is empty: give a folder or a hub id, or leave it out for the "
            "reference model"
        )
    chosen = given(options)
    names = field_names(ServerConfig)
    config = ServerConfig(**{name: chosen.pop(name) for name in names if name in chosen})
    require_free(config.host, config.port)
    with startup_bar() as on_progress:
        service = make_service(model, config, chosen, on_progress)
    sys.exit(run(service))
