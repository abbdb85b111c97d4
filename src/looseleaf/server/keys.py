"""API keys and their tenants.

A tenant's salt is part of every segment key, so tenants share no KV, ids or cache hits."""

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from looseleaf.errors import InvalidOption
from looseleaf.server.errors import ApiError

KEYS_VARIABLE = "LOOSELEAF_KEYS"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LEAST_KEY = 8
# permission to read or write for the group and for everybody
_OF_OTHERS = 0o066


@dataclass(frozen=True)
class Caller:
    """A tenant, and the digest of its API key, which rate limits count by."""

    tenant: str
    key: str
    cache_salt: str | None = None

    @property
    def salt(self) -> str:
        """The salt of segment keys: of the tenant and the request; empty without both."""
        tenant = f"tenant {self.tenant}" if self.tenant else ""
        # tenants' names have no line break
        return tenant if self.cache_salt is None else f"{tenant}\nsalt {self.cache_salt}"

    def salted(self, cache_salt: str | None) -> "Caller":
        """The caller of a request with its own salt."""
        return replace(self, cache_salt=cache_salt)


OPEN_CALLER = Caller("", "")
"""The caller of all requests to a server without keys."""


class KeyRing:
    """All callers by the digest of their key; empty on a server without keys."""

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        self._callers = dict(callers)

    @property
    def is_open(self) -> bool:
        return not self._callers

    @property
    def tenants(self) -> frozenset[str]:
        return frozenset(caller.tenant for caller in self._callers.values())

    def find(self, header: str | None, api_key: str | None = None) -> Caller:
        """The caller of an ``Authorization`` header, or else of an ``X-Api-Key`` header.

        Raises ApiError (401)."""
        if self.is_open:
            return OPEN_CALLER
        if header is None and api_key is not None:
            header = f"Bearer {api_key}"
        scheme, _, key = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("send an API key in the header Authorization: Bearer KEY")
        # the lookup time of a digest does not depend on correct characters of a key
        caller = self._callers.get(_digest(key.strip()))
        if caller is None:
            raise _unauthorized("this API key is unknown: check it, or ask the server's operator")
        return caller


def read_keys(path: Path | None, variable: str | None) -> KeyRing:
    """Keys from a file and from an environment variable, with commas or line breaks between them.

    Raises InvalidOption for an invalid line or a repeated key."""
    lines: list[tuple[str, str]] = []
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidOption(f"the file of API keys {path} can't be read: {error}") from error
        lines += [(f"{path}:{n}", line) for n, line in enumerate(text.splitlines(), 1)]
    if variable:
        lines += [(KEYS_VARIABLE, line) for line in re.split(r"[,\n]", variable)]
    callers = dict(_read_lines(lines))
    if not callers and (path is not None or variable):
        raise InvalidOption("the list of API keys is empty: add lines TENANT=KEY")
    return KeyRing(callers)


def _read_lines(lines: Iterable[tuple[str, str]]) -> Iterable[tuple[str, Caller]]:
    seen: set[str] = set()
    for where, line in lines:
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        tenant, equals, key = content.partition("=")
        tenant, key = tenant.strip(), key.strip()
        if not equals or not _TENANT.fullmatch(tenant) or len(key) < _LEAST_KEY or " " in key:
            raise InvalidOption(
                f"{where}: write TENANT=KEY, a name and at least {_LEAST_KEY} characters without "
                "blanks"
            )
        digest = _digest(key)
        if digest in seen:
            raise InvalidOption(f"{where}: the key of {tenant} was given before: make another one")
        seen.add(digest)
        yield digest, Caller(tenant, digest[:16])


def exposure(path: Path) -> str | None:
    """A sentence that says what to do about a file of keys that users other than its owner can read
    or change; None for a private file, and for one that can't be looked at."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:
        return None
    if not mode & _OF_OTHERS:
        return None
    return (
        f"the file of API keys {path} can be read or changed by users other than its owner (mode "
        f"{mode:03o}): run chmod 600 on it"
    )


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """The host of a header ``Host``, in lower case and without the port."""
    host = header.lower()
    if host.startswith("[") and "]" in host:
        return host[: host.rindex("]") + 1]
    return host.partition(":")[0]


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _unauthorized(message: str) -> ApiError:
    return ApiError(
        401,
        message,
        code="invalid_api_key",
        headers={"WWW-Authenticate": 'Bearer realm="looseleaf"'},
    )
