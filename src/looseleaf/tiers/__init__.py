"""Storage of segments outside the device pool: host memory, disk, and a shared server.

A tier stores *records*: the KV pages of a segment under its key. Loads are layer-wise, so that a
layer loads while the layer before it is computed. A tier that fails, corrupts data or is slow costs
time and never changes an answer."""

from looseleaf.tiers.claims import Claims
from looseleaf.tiers.stores.base import (
    Entry,
    Fault,
    Reader,
    Record,
    Tier,
    TierCounters,
    TierFault,
)
from looseleaf.tiers.stores.disk import HOSTED, DiskTier
from looseleaf.tiers.stores.host import HostTier
from looseleaf.tiers.stores.ledger import Ledger
from looseleaf.tiers.stores.remote import RemoteTier
from looseleaf.tiers.stores.shared import SharedTier, shared_tier
from looseleaf.tiers.tiers import PagedSegment, Tiers, TierState, tenant_of
from looseleaf.tiers.transfer.load import Load, LoadFailed, LoadState
from looseleaf.tiers.transfer.pool_copy import PageExport
from looseleaf.tiers.wrapping import WrappedTier

__all__ = [
    "HOSTED",
    "Tiers",
    "TierState",
    "PagedSegment",
    "Load",
    "LoadFailed",
    "LoadState",
    "PageExport",
    "tenant_of",
    "Tier",
    "Record",
    "Reader",
    "Entry",
    "Fault",
    "TierFault",
    "TierCounters",
    "HostTier",
    "DiskTier",
    "Claims",
    "RemoteTier",
    "SharedTier",
    "shared_tier",
    "WrappedTier",
    "Ledger",
]
