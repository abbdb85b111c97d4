"""``looseleaf cache``: look at, delete and check the documents that tiers hold, without a model."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from looseleaf.errors import InvalidOption

if TYPE_CHECKING:
    from looseleaf.tiers import DiskTier, Entry, RemoteTier

Command = TypeVar("Command", bound=Callable[..., Any])
_MIB = 1 << 20


def _tier_options(command: Command) -> Command:
    disk = click.option("--disk-path", metavar="FOLDER", help="the folder of a disk tier")
    remote = click.option("--remote-url", metavar="URL", help="the server of a remote tier")
    return disk(remote(command))


@click.group()
def cache() -> None:
    """Look after documents that are stored on disk or at a Redis or Valkey server."""


@cache.command("ls")
@_tier_options
def list_records(disk_path: str | None, remote_url: str | None) -> None:
    """One line a document: its key, size, tenant and age, those that go first first."""
    with _opened(disk_path, remote_url) as tier:
        for entry in tier.entries():
            age = f"{(time.time() - entry.created) / 3600:.1f} h" if entry.created else "-"
            size = f"{entry.num_bytes / _MIB:.2f} MiB"
            click.echo(f"{entry.key.hex()}  {size:>12}  {entry.tenant or '-':16}  {age:>8}")


@cache.command()
@_tier_options
def stat(disk_path: str | None, remote_url: str | None) -> None:
    """Documents and bytes, in all and by tenant."""
    with _opened(disk_path, remote_url) as tier:
        entries: list[Entry] = list(tier.entries())
    count, size = Counter[str](), Counter[str]()
    for entry in entries:
        count[entry.tenant] += 1
        size[entry.tenant] += entry.num_bytes
    click.echo(f"{len(entries)} documents, {sum(size.values()) / _MIB:.2f} MiB")
    for tenant, held in size.most_common():
        name = tenant or "no tenant"
        click.echo(f"{name}: {count[tenant]} documents, {held / _MIB:.2f} MiB")


@cache.command("rm")
@_tier_options
@click.argument("keys", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="delete every document")
@click.option("--tenant", help="delete every document of a tenant, as ls shows it")
def remove(
    disk_path: str | None,
    remote_url: str | None,
    keys: tuple[str, ...],
    everything: bool,
    tenant: str | None,
) -> None:
    """Delete documents by their KEYS, or the beginnings of these that tell them apart."""
    if sum((bool(keys), everything, tenant is not None)) != 1:
        raise InvalidOption("say what to delete: some KEYS, --tenant, or --all")
    with _opened(disk_path, remote_url) as tier:
        entries = list(tier.entries())
        chosen = [e for e in entries if everything or (tenant is not None and e.tenant == tenant)]
        for beginning in keys:
            matching = [e for e in entries if e.key.hex().startswith(beginning.lower())]
            if len(matching) != 1:
                raise InvalidOption(
                    f"{len(matching)} documents have a key that begins with {beginning!r}: "
                    "looseleaf cache ls shows them all"
                )
            chosen += matching
        deleted = tier.delete([entry.key for entry in chosen])
    click.echo(f"{deleted} documents deleted")


@cache.command()
@_tier_options
@click.option("--delete", is_flag=True, help="delete what is damaged")
def verify(disk_path: str | None, remote_url: str | None, delete: bool) -> None:
    """Read everything and compare it with its checksums; the exit code is 1 if anything is damaged.

    What is damaged costs an engine no answer: it is found out, deleted and computed again. At a
    server damaged documents are deleted as they are found."""
    checked, damaged = 0, []
    with _opened(disk_path, remote_url) as tier:
        for name, wrong in tier.verify():
            checked += 1
            if wrong is not None:
                damaged.append(name)
                click.echo(f"{name}: {wrong}")
        if delete and damaged:
            tier.discard(damaged)
    click.echo(f"{checked} checked, {len(damaged)} damaged")
    sys.exit(1 if damaged else 0)


@contextmanager
def _opened(disk_path: str | None, remote_url: str | None) -> "Iterator[DiskTier | RemoteTier]":
    """The one tier that is named; what it can't do is one sentence."""
    from pathlib import Path

    from looseleaf.tiers import DiskTier, Ledger, RemoteTier, TierFault

    if (disk_path is None) == (remote_url is None):
        raise InvalidOption("name one tier: --disk-path FOLDER or --remote-url URL")
    try:
        if disk_path is not None:
            folder = Path(disk_path).expanduser()
            if not folder.is_dir():
                raise InvalidOption(f"there is no folder {disk_path}")
            # whatever it may hold, looking at it evicts nothing
            yield DiskTier(folder, Ledger(sys.maxsize))
            return
        tier = RemoteTier(remote_url or "")
        try:
            yield tier
        finally:
            tier.close()
    except TierFault as fault:
        raise InvalidOption(f"the tier can't be used: {fault}") from fault
