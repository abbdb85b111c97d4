"""Where segments are kept besides the device pool, and how much there."""

import os
from dataclasses import dataclass
from typing import Literal

from looseleaf.config.option import (
    option,
    require_kinds,
    require_not_negative,
    require_positive,
    require_share,
)

TierPacking = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class TierConfig:
    """Tiers below the pool: the host's memory, a disk, a Redis or Valkey server; any or none.

    A document that was computed is written to all of them in the background, and one that is
    missing from the pool is looked for in them before it is computed."""

    host_gib: float = option(
        0.0, "memory of the host for documents outside the pool, in GiB; 0: none"
    )
    disk_path: str | None = option(None, "folder for documents on disk; default: none")
    disk_gib: float = option(16.0, "most that the folder may hold, in GiB")
    remote_url: str | None = option(
        None, "Redis or Valkey server for documents, redis://HOST:PORT/DATABASE; default: none"
    )
    tier_ttl: float | None = option(
        None, "seconds after which a stored document is dropped; default: never"
    )
    tenant_share: float = option(
        1.0, "largest share of the host's memory and of the disk that one salt may fill"
    )
    tier_timeout: float = option(
        5.0, "seconds without a byte after which a tier is given up and the document computed"
    )
    staging_gib: float = option(
        1.0, "memory for documents on their way to and from disk or server, in GiB"
    )
    tier_packing: TierPacking = option(
        "auto",
        "store keys and values of bfloat16 in three quarters of their bytes, without losing any: "
        "on, off, or auto: from a GPU",
    )

    def __post_init__(self) -> None:
        if isinstance(self.disk_path, os.PathLike):
            object.__setattr__(self, "disk_path", os.fspath(self.disk_path))
        require_kinds(self)
        require_not_negative(self, "host_gib")
        require_positive(self, "disk_gib", "tier_timeout", "staging_gib", "tier_ttl")
        require_share(self, "tenant_share")

    @property
    def any(self) -> bool:
        """Whether there is a tier at all."""
        return bool(self.host_gib or self.disk_path or self.remote_url)

    @property
    def outlive(self) -> bool:
        """Whether documents are there for the next process, and for those of other machines."""
        return bool(self.disk_path or self.remote_url)
