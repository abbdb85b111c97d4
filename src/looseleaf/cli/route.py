"""``looseleaf route``: a proxy in front of several servers, which sends requests to the replica
that holds their documents."""

import os
import sys
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import click

from looseleaf.cli.options import explicit_options, section_options
from looseleaf.cli.signals import exit_on_sigterm
from looseleaf.config.route import RouteConfig
from looseleaf.errors import InvalidOption, install

KEY_VARIABLE = "LOOSELEAF_REPLICA_KEY"
"""The variable with the operator's key of the replicas."""

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "structlog", "aiohttp")


@click.command()
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@section_options(RouteConfig)
def route(urls: tuple[str, ...], **options: Any) -> None:
    """Serve the API of several servers at one address: http://HOST:PORT of each.

    A request goes to the replica that holds its documents, within bounds of load. If the servers
    have API keys, LOOSELEAF_REPLICA_KEY is their operator's key, which reads what they hold.
    """
    exit_on_sigterm()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InvalidOption(f"routing needs {missing[0]}: {install('route')}")
    config = RouteConfig(**explicit_options(options))
    bases = [_base(url) for url in urls]
    if len(set(bases)) < len(bases):
        raise InvalidOption("two URLs are the same server: give each once")
    from looseleaf.proxy.run import route as run
    from looseleaf.server.ports import require_free

    require_free(config.host, config.port)
    sys.exit(run(bases, config, os.environ.get(KEY_VARIABLE, "")))


def _base(url: str) -> str:
    """A server's URL without a path. Raises InvalidOption."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path not in ("", "/"):
        raise InvalidOption(f"{url!r} is no server's address: write http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}"
