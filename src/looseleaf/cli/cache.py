"""``looseleaf cache``: lists, deletes and verifies documents of tiers, without a model."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from looseleaf.cli.lazy import SuggestingGroup
from looseleaf.errors import InvalidOption

if TYPE_CHECKING:
    from looseleaf.tiers import DiskTier, Entry, SharedTier

Command = TypeVar("Command", bound=Callable[..., Any])
_MIB = 1 << 20
_NO_TENANT = "-"


def _tier_options(command: Command) -> Command:
    disk = click.option("--disk-path", metavar="FOLDER", help="folder of a disk tier")
    remote = click.option("--remote-url", metavar="URL", help="server of a remote tier")
    return disk(remote(command))


@click.group(cls=SuggestingGroup)
def cache() -> None:
    """List, delete and verify documents stored on disk or in a Redis or Valkey server."""


@cache.command("ls")
@_tier_options
def list_records(disk_path: str | None, remote_url: str | None) -> None:
    """Print key, size, tenant and age of each document, in the order of eviction; hosted documents
    come last."""
    with _open_tiers(disk_path, remote_url) as tiers:
        for subfolder, tier in tiers.items():
            for entry in tier.entries():
                age = f"{(time.time() - entry.created) / 3600:.1f} h" if entry.created else "-"
                size = f"{entry.num_bytes / _MIB:.2f} MiB"
                line = f"{entry.key.hex()}  {size:>12}  {entry.tenant or _NO_TENANT:16}  {age:>8}"
                click.echo(f"{line}  {subfolder}".rstrip())


@cache.command()
@_tier_options
def stat(disk_path: str | None, remote_url: str | None) -> None:
    """Print the number and size of documents: in total, hosted, and by tenant (- for none)."""
    from looseleaf.tiers import HOSTED

    count, size = Counter[str](), Counter[str]()
    with _open_tiers(disk_path, remote_url) as tiers:
        by_folder = {subfolder: list(tier.entries()) for subfolder, tier in tiers.items()}
    entries: list[Entry] = list(chain.from_iterable(by_folder.values()))
    for entry in entries:
        count[entry.tenant] += 1
        size[entry.tenant] += entry.num_bytes
    click.echo(f"{len(entries)} documents, {sum(size.values()) / _MIB:.2f} MiB")
    if hosted := by_folder.get(HOSTED):
        num_bytes = sum(entry.num_bytes for entry in hosted)
        click.echo(f"of these hosted: {len(hosted)} documents, {num_bytes / _MIB:.2f} MiB")
    for tenant, num_bytes in size.most_common():
        click.echo(f"{tenant or _NO_TENANT}: {count[tenant]} documents, {num_bytes / _MIB:.2f} MiB")


@cache.command("rm")
@_tier_options
@click.argument("keys", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="delete every document")
@click.option(
    "--tenant",
    help="delete every document of a tenant: its digest as in ls, its name at the server, or its "
    "salt",
)
def remove(
    disk_path: str | None,
    remote_url: str | None,
    keys: tuple[str, ...],
    everything: bool,
    tenant: str | None,
) -> None:
    """Delete documents by their KEYS, or unambiguous prefixes of keys."""
    if sum((bool(keys), everything, tenant is not None)) != 1:
        raise InvalidOption("say what to delete: KEYS, --tenant, or --all")
    with _open_tiers(disk_path, remote_url) as tiers:
        entries = [entry for tier in tiers.values() for entry in tier.entries()]
        digest = None if tenant is None else _tenant(tenant, {e.tenant for e in entries})
        selection = {e.key for e in entries if everything or e.tenant == digest}
        for prefix in keys:
            matches = {e.key for e in entries if e.key.hex().startswith(prefix.lower())}
            if len(matches) != 1:
                raise InvalidOption(
                    f"{len(matches)} documents have a key that begins with {prefix!r}: "
                    "looseleaf cache ls lists all keys"
                )
            selection |= matches
        deleted = sum(tier.delete(list(selection)) for tier in tiers.values())
    click.echo(f"{deleted} documents deleted")


@cache.command()
@_tier_options
@click.option("--delete", is_flag=True, help="delete damaged documents")
def verify(disk_path: str | None, remote_url: str | None, delete: bool) -> None:
    """Compare all documents with their checksums. The exit code is 1 if a document is damaged or
    unreadable.

    Damaged documents never change an answer: an engine detects them, deletes them and computes them
    again. In a server, damaged documents are always deleted. Unreadable documents are kept."""
    checked, damaged, unreadable = 0, 0, 0
    with _open_tiers(disk_path, remote_url) as tiers:
        for subfolder, tier in tiers.items():
            names = []
            for name, fault in tier.verify():
                checked += 1
                if fault is None:
                    continue
                if fault.kind in ("damaged", "missing"):
                    names.append(name)
                    click.echo(f"{Path(subfolder) / name}: {fault}")
                else:
                    unreadable += 1
                    click.echo(f"{Path(subfolder) / name}: unreadable, {fault}")
            if delete and names:
                tier.discard(names)
            damaged += len(names)
    suffix = f", {unreadable} unreadable" if unreadable else ""
    click.echo(f"{checked} checked, {damaged} damaged{suffix}")
    sys.exit(1 if damaged or unreadable else 0)


def _tenant(name: str, digests: set[str]) -> str | None:
    """The digest of a tenant in records; None without a match among ``digests``.

    ``name`` is the digest itself, a salt, or the name of a server's tenant. Records do not contain
    salts. Raises InvalidOption for an ambiguous name."""
    from looseleaf.tiers import tenant_of

    digest = "" if name == _NO_TENANT else name
    if digest in digests:
        return digest
    # a server derives the salt of a tenant from its name
    matches = {tenant_of(salt) for salt in (name, f"tenant {name}")} & digests
    if len(matches) > 1:
        raise InvalidOption(
            f"{name!r} is a salt and also a tenant of a server: give its digest, as in looseleaf "
            f"cache ls: {' or '.join(sorted(matches))}"
        )
    return next(iter(matches), None)


@contextmanager
def _open_tiers(
    disk_path: str | None, remote_url: str | None
) -> "Iterator[dict[str, DiskTier | SharedTier]]":
    """The tier by its subfolder "", and of a disk also the tier of hosted documents.

    Raises InvalidOption for a tier that can't be used."""
    from looseleaf.tiers import TierFault, shared_tier

    if (disk_path is None) == (remote_url is None):
        raise InvalidOption("name one tier: --disk-path FOLDER or --remote-url URL")
    try:
        if disk_path is not None:
            yield _disk_tiers(Path(disk_path).expanduser())
            return
        tier = shared_tier(remote_url or "")
        try:
            yield {"": tier}
        finally:
            tier.close()
    except TierFault as fault:
        raise InvalidOption(f"the tier can't be used: {fault}") from fault


def _disk_tiers(folder: Path) -> "dict[str, DiskTier | SharedTier]":
    from looseleaf.tiers import HOSTED, DiskTier, Ledger

    if not folder.is_dir():
        raise InvalidOption(f"there is no folder {folder}")
    if not DiskTier.is_in(folder):
        raise InvalidOption(
            f"{folder} is no folder of a disk tier: give the --disk-path of serve, ask or LLM"
        )
    subfolders = [name for name in ("", HOSTED) if DiskTier.is_in(folder / name)]
    # without a size limit, so that opening the tier evicts nothing
    return {name: DiskTier(folder / name, Ledger(sys.maxsize)) for name in subfolders}
