"""``looseleaf serve``: the OpenAI API over HTTP.

Flags override environment variables, which override the file of ``--config``. Other options have
the defaults of the configuration."""

import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from looseleaf.cli.options import ENGINE_SECTIONS, explicit_options, field_names, section_options
from looseleaf.cli.signals import exit_on_sigterm
from looseleaf.cli.startup import startup_bar
from looseleaf.cli.variables import PREFIX, remove_injected, require_known
from looseleaf.config import ServerConfig
from looseleaf.errors import InvalidOption, install

NEEDED = (
    "fastapi",
    "uvicorn",
    "pydantic",
    "prometheus_client",
    "structlog",
    "llguidance",
    "msgspec",
)


def read_file(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Set the defaults of the command from a TOML file, and validate environment variables.

    Raises InvalidOption for unknown options, values of a wrong type, and unknown variables."""
    # the option is eager, so this precedes click's reads of the environment
    known = option_names()
    remove_injected(known)
    require_known(known)
    if path is None:
        return
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidOption(f"the configuration {path} can't be read: {error}") from error
    # click would truncate floats of a file to integers
    parameters = context.command.params
    whole = {option.name for option in parameters if option.type is click.INT}
    switches = {
        option.name for option in parameters if isinstance(option.type, click.types.BoolParamType)
    }
    for name, value in content.items():
        if name not in known:
            raise InvalidOption(
                f"{path}: unknown option {name!r}: looseleaf serve --help lists all options"
            )
        if isinstance(value, dict) or (isinstance(value, list) and name != "system_prompt"):
            raise InvalidOption(f"{path}: {name} must be one value")
        if isinstance(value, float | bool) and name in whole:
            raise InvalidOption(f"{path}: {name} must be a whole number, not {value}")
        if not isinstance(value, bool) and name in switches:
            raise InvalidOption(f"{path}: {name} must be true or false, not {value!r}")
    context.default_map = content


def option_names() -> list[str]:
    """All options of the command, as named in a configuration file."""
    return ["model", *field_names(ServerConfig, *ENGINE_SECTIONS)]


@click.command(context_settings={"auto_envvar_prefix": PREFIX})
@click.argument("model", required=False, envvar="LOOSELEAF_MODEL")
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    is_eager=True,
    expose_value=False,
    callback=read_file,
    help="TOML file of options, with the names of flags and underscores for hyphens",
)
@section_options(*ENGINE_SECTIONS, ServerConfig)
def serve(model: str | None, **options: Any) -> None:
    """Serve MODEL over the OpenAI API: a checkpoint folder, a GGUF file, a hub id or
    looseleaf-reference-causal. The default is the reference model looseleaf-reference.

    Every option is also read from the environment variable LOOSELEAF_NAME and the file of --config.
    """
    exit_on_sigterm()
    if find_spec("resource") is None:
        raise InvalidOption(
            "the server needs signals and limits of Linux or macOS: on Windows, run it in WSL"
        )
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InvalidOption(f"serving needs {missing[0]}: {install('serve')}")
    from looseleaf.server.ports import require_free

    if model is not None and not model.strip():
        raise InvalidOption(
            "the model's name is empty: give a folder or a hub id, or leave it out for the "
            "reference model"
        )
    chosen = explicit_options(options)
    names = field_names(ServerConfig)
    config = ServerConfig(**{name: chosen.pop(name) for name in names if name in chosen})
    require_free(config.host, config.port)
    sys.exit(_run(model, config, chosen))


def _run(model: str | None, config: ServerConfig, options: dict[str, Any]) -> int:
    """Serve in one process or in several; the exit status."""
    from looseleaf.machine.limits import usable_cores
    from looseleaf.server.ports import can_share
    from looseleaf.server.processes.supervisor import Supervisor, default_processes

    number = config.api_processes
    if number is None:
        number = default_processes(str(options.get("device", "auto")), usable_cores())
    if number > 1 and not can_share():
        raise InvalidOption(
            "several API processes share a port on Linux only: give api_processes=1",
            "api_processes",
        )
    if number:
        return Supervisor(model, config, options, number, startup_bar).run()
    from looseleaf.server.run import serve as run
    from looseleaf.server.service import make_service

    with startup_bar() as on_progress:
        service = make_service(model, config, options, on_progress)
    return run(service)
