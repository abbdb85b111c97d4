"""``looseleaf cache``: look at, delete and check the documents that tiers hold, without a model."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from looseleaf.cli.lazy import SuggestingGroup
from looseleaf.errors import InvalidOption

if TYPE_CHECKING:
    from looseleaf.tiers import DiskTier, Entry, RemoteTier

Command = TypeVar("Command", bound=Callable[..., Any])
_MIB = 1 << 20
_NOBODY = "-"


def _tier_options(command: Command) -> Command:
    disk = click.option("--disk-path", metavar="FOLDER", help="the folder of a disk tier")
    remote = click.option("--remote-url", metavar="URL", help="the server of a remote tier")
    return disk(remote(command))


@click.group(cls=SuggestingGroup)
def cache() -> None:
    """Look after documents that are stored on disk or at a Redis or Valkey server."""


@cache.command("ls")
@_tier_options
def list_records(disk_path: str | None, remote_url: str | None) -> None:
    """One line a document: its key, size, tenant and age, those that go first first, and behind
    them those that are hosted."""
    with _opened(disk_path, remote_url) as places:
        for place, tier in places.items():
            for entry in tier.entries():
                age = f"{(time.time() - entry.created) / 3600:.1f} h" if entry.created else "-"
                size = f"{entry.num_bytes / _MIB:.2f} MiB"
                line = f"{entry.key.hex()}  {size:>12}  {entry.tenant or _NOBODY:16}  {age:>8}"
                click.echo(f"{line}  {place}".rstrip())


@cache.command()
@_tier_options
def stat(disk_path: str | None, remote_url: str | None) -> None:
    """Documents and bytes, in all, of hosted ones, and by tenant; - are those that have none."""
    from looseleaf.tiers import HOSTED

    count, size = Counter[str](), Counter[str]()
    with _opened(disk_path, remote_url) as places:
        held = {place: list(tier.entries()) for place, tier in places.items()}
    entries: list[Entry] = [entry for some in held.values() for entry in some]
    for entry in entries:
        count[entry.tenant] += 1
        size[entry.tenant] += entry.num_bytes
    click.echo(f"{len(entries)} documents, {sum(size.values()) / _MIB:.2f} MiB")
    if hosted := held.get(HOSTED):
        num_bytes = sum(entry.num_bytes for entry in hosted)
        click.echo(f"of these hosted: {len(hosted)} documents, {num_bytes / _MIB:.2f} MiB")
    for tenant, num_bytes in size.most_common():
        click.echo(f"{tenant or _NOBODY}: {count[tenant]} documents, {num_bytes / _MIB:.2f} MiB")


@cache.command("rm")
@_tier_options
@click.argument("keys", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="delete every document")
@click.option(
    "--tenant",
    help="delete every document of a tenant, as ls shows it, "
    "or by its name at the server, or its salt",
)
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
    with _opened(disk_path, remote_url) as places:
        entries = [entry for tier in places.values() for entry in tier.entries()]
        whose = None if tenant is None else _tenant(tenant, {e.tenant for e in entries})
        chosen = {e.key for e in entries if everything or e.tenant == whose}
        for beginning in keys:
            matching = {e.key for e in entries if e.key.hex().startswith(beginning.lower())}
            if len(matching) != 1:
                raise InvalidOption(
                    f"{len(matching)} documents have a key that begins with {beginning!r}: "
                    "looseleaf cache ls shows them all"
                )
            chosen |= matching
        deleted = sum(tier.delete(list(chosen)) for tier in places.values())
    click.echo(f"{deleted} documents deleted")


@cache.command()
@_tier_options
@click.option("--delete", is_flag=True, help="delete what is damaged")
def verify(disk_path: str | None, remote_url: str | None, delete: bool) -> None:
    """Read everything and compare it with its checksums; the exit code is 1 if anything is damaged
    or can't be read.

    What is damaged costs an engine no answer: it is found out, deleted and computed again. At a
    server damaged documents are deleted as they are found. What can't be read is kept."""
    checked, damaged, unreadable = 0, 0, 0
    with _opened(disk_path, remote_url) as places:
        for place, tier in places.items():
            harmed = []
            for name, wrong in tier.verify():
                checked += 1
                if wrong is None:
                    continue
                if wrong.kind in ("damaged", "missing"):
                    harmed.append(name)
                    click.echo(f"{Path(place) / name}: {wrong}")
                else:
                    unreadable += 1
                    click.echo(f"{Path(place) / name}: unreadable, {wrong}")
            if delete and harmed:
                tier.discard(harmed)
            damaged += len(harmed)
    more = f", {unreadable} unreadable" if unreadable else ""
    click.echo(f"{checked} checked, {damaged} damaged{more}")
    sys.exit(1 if damaged or unreadable else 0)


def _tenant(name: str, known: set[str]) -> str | None:
    """What records say of the tenant that ``name`` means, None if none of those ``known`` is meant.

    They hold a digest of its salt: who knows the salt finds it, and nobody reads it there."""
    from looseleaf.tiers import tenant_of

    shown = "" if name == _NOBODY else name
    if shown in known:
        return shown
    # the second is the salt that a server gives to its tenant of that name
    found = {tenant_of(salt) for salt in (name, f"tenant {name}")} & known
    if len(found) > 1:
        raise InvalidOption(
            f"{name!r} is a salt and also a tenant of a server: say which of both, as looseleaf "
            f"cache ls shows them: {' or '.join(sorted(found))}"
        )
    return next(iter(found), None)


@contextmanager
def _opened(
    disk_path: str | None, remote_url: str | None
) -> "Iterator[dict[str, DiskTier | RemoteTier]]":
    """What is named, by place: the tier, and of a folder also that of its hosted documents. What
    can't be done is one sentence."""
    from looseleaf.tiers import RemoteTier, TierFault

    if (disk_path is None) == (remote_url is None):
        raise InvalidOption("name one tier: --disk-path FOLDER or --remote-url URL")
    try:
        if disk_path is not None:
            yield _of_folder(Path(disk_path).expanduser())
            return
        tier = RemoteTier(remote_url or "")
        try:
            yield {"": tier}
        finally:
            tier.close()
    except TierFault as fault:
        raise InvalidOption(f"the tier can't be used: {fault}") from fault


def _of_folder(folder: Path) -> "dict[str, DiskTier | RemoteTier]":
    from looseleaf.tiers import HOSTED, DiskTier, Ledger

    if not folder.is_dir():
        raise InvalidOption(f"there is no folder {folder}")
    if not DiskTier.is_in(folder):
        raise InvalidOption(
            f"{folder} is no folder of a disk tier: give what serve, ask or LLM had as --disk-path"
        )
    places = [place for place in ("", HOSTED) if DiskTier.is_in(folder / place)]
    # whatever it may hold, looking at it evicts nothing
    return {place: DiskTier(folder / place, Ledger(sys.maxsize)) for place in places}
