"""The address of a server: whether it is free, sockets at it, and its fields in the log."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from looseleaf.errors import InvalidOption


def require_free(host: str, port: int) -> None:
    """Raises InvalidOption for an address that is not free; call it before loading a model."""
    with _naming(host, port):
        _bound(host, port, shared=False).close()


def reserve(host: str, port: int) -> socket.socket:
    """A socket that keeps an address for the sockets of `shared_socket`, without connections.

    ``port`` 0 is a free one. Raises InvalidOption."""
    with _naming(host, port):
        return _bound(host, port, shared=True)


def shared_socket(host: str, port: int) -> socket.socket:
    """A socket at an address that several processes of this user share.

    The kernel distributes connections over the processes. Raises OSError."""
    return _bound(host, port, shared=True)


def can_share() -> bool:
    """Whether the kernel distributes connections over processes."""
    return sys.platform == "linux"


def address_fields(
    host: str, port: int, threads: str | None, *, encrypted: bool = False
) -> dict[str, str]:
    """The URL of a server that accepts connections, and its CPU threads, if known."""
    scheme = "https" if encrypted else "http"
    shown = f"[{host}]" if ":" in host else host
    fields = {} if threads is None else {"threads": threads}
    return {"url": f"{scheme}://{shown}:{port}/", **fields}


@contextmanager
def _naming(host: str, port: int) -> Iterator[None]:
    """Turns an OSError into an InvalidOption that names the address."""
    try:
        yield
    except OSError as error:
        raise InvalidOption(
            f"nothing can listen at {host}, port {port} ({error.strerror}): give another --port, "
            "0 for a free one, or another --host"
        ) from error


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = addresses[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # as in the server: ignore connections in TIME_WAIT
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
