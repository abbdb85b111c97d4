"""The configuration of the tiers that store segments outside of the device pool."""

import os
from dataclasses import dataclass
from typing import Literal

from looseleaf.config.option import (
    option,
    require,
    require_kinds,
    require_not_negative,
    require_positive,
    require_share,
)

TierPacking = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class TierConfig:
    """Tiers below the pool: host memory, disk, and a server (Redis, Valkey, S3); any or none.

    Computed documents are written to all tiers in the background. A document that is missing from
    the pool is loaded from a tier if possible, and computed otherwise."""

    host_gib: float = option(0.0, "host memory for documents outside the pool, in GiB; 0: none")
    disk_path: str | None = option(None, "folder for documents on disk; default: none")
    disk_gib: float = option(16.0, "largest size of the folder, in GiB")
    remote_url: str | None = option(
        None,
        "Redis or Valkey server, redis://HOST:PORT/DATABASE, or object store, "
        "s3://BUCKET/PREFIX?endpoint=URL; default: none",
    )
    compute_once: bool = option(
        False,
        "with remote_url: of all engines at that server, one computes a document, and the others "
        "wait for it",
    )
    tier_ttl: float | None = option(
        None, "age at which a stored document is dropped (s); default: never"
    )
    tenant_share: float = option(1.0, "largest share of host memory and disk for one salt")
    tier_timeout: float = option(
        5.0, "time without data after which a load is abandoned and the document computed (s)"
    )
    staging_gib: float = option(1.0, "memory for transfers to and from disk or server, in GiB")
    tier_packing: TierPacking = option(
        "auto",
        "lossless compression of bfloat16 keys and values to three quarters: on, off, or auto: on "
        "with a GPU",
    )

    def __post_init__(self) -> None:
        if isinstance(self.disk_path, os.PathLike):
            object.__setattr__(self, "disk_path", os.fspath(self.disk_path))
        require_kinds(self)
        require_not_negative(self, "host_gib")
        require_positive(self, "disk_gib", "tier_timeout", "staging_gib", "tier_ttl")
        require_share(self, "tenant_share")
        require(
            not self.compute_once or self.remote_url is not None,
            "compute_once needs a tier that engines share: give remote_url too",
            *("compute_once", "remote_url"),
        )

    @property
    def any(self) -> bool:
        """Whether any tier is configured."""
        return bool(self.host_gib or self.disk_path or self.remote_url)

    @property
    def outlive(self) -> bool:
        """Whether a configured tier persists documents beyond this process."""
        return bool(self.disk_path or self.remote_url)
