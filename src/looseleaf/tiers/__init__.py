"""Where segments live besides the device pool: host memory, a disk, a server of several engines.

A tier keeps *records*, segments by key; a disk also what was derived from them (side-cars). It is
asked layer by layer, so that a layer's keys and values can be on their way while the layer before
it is computed. A tier may fail, lie or be slow; that costs time, never an answer."""

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
from looseleaf.tiers.tiers import Tiers, TierState, Wanted, tenant_of
from looseleaf.tiers.transfer.load import Load, LoadFailed
from looseleaf.tiers.transfer.pool_copy import Copied
from looseleaf.tiers.wrapping import WrappedTier

__all__ = [
    "HOSTED",
    "Tiers",
    "TierState",
    "Wanted",
    "Load",
    "LoadFailed",
    "Copied",
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
    "RemoteTier",
    "WrappedTier",
    "Ledger",
]
