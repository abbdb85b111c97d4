"""Storage of host-resident documents in a tier: one record of keys and values, and its index."""

import hashlib
import logging

import numpy as np
import torch

from looseleaf.config import IndexConfig
from looseleaf.engine.documents.host_prefill import LEARNING, HostingJob
from looseleaf.errors import LooseleafError
from looseleaf.index import SegmentIndex
from looseleaf.index.host.segment import HostedSegment
from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers import DiskTier, Record, TierFault
from looseleaf.tiers.stores.files import dtype_name

_SIDECAR = "index"
_log = logging.getLogger(__name__)


def stored_key(key: SegmentKey) -> SegmentKey:
    """The key in a tier, which differs from the key of the same document in pages."""
    return SegmentKey(hashlib.blake2b(b"hosted" + key, digest_size=32).digest())


def is_stored(tier: DiskTier | None, key: SegmentKey) -> bool:
    """Whether a tier has a record of the document; False without a tier."""
    try:
        return tier is not None and tier.contains([stored_key(key)])[0]
    except TierFault:
        return False


def store(tier: DiskTier | None, job: HostingJob) -> bool | None:
    """Store a document with its index. Returns whether both are stored; None without a tier.

    A failure is logged."""
    segment = job.segment
    if tier is None or segment.index is None:
        return None
    kv = segment.kv
    record = Record(
        stored_key(segment.key),
        segment.num_tokens,
        kv.shape[0],
        # one page for the whole document
        (kv.shape[1], 1, kv.shape[2], kv.shape[3], kv.shape[4]),
        dtype_name(kv.dtype),
        kv[0].numel() * kv.element_size(),
        job.tenant,
    )
    try:
        tier.put(record, kv.view(len(kv), -1).view(torch.uint8))
        arrays = {n: torch.from_numpy(a.copy()) for n, a in segment.index.arrays().items()}
        kept = tier.put_sidecar(record.key, _SIDECAR, arrays)
    except TierFault as error:
        # a failed write only makes the next start slower
        tier.counters.count_fault(error.kind)
        _log.warning("a hosted document is not kept on disk: %s", error)
        return False
    if not kept:
        _log.warning(
            "a hosted document of %.1f MiB is not kept on disk, where there is no room for it: "
            "it is computed and indexed again at the next start, unless disk_gib is raised",
            segment.num_bytes / 2**20,
        )
    return kept


def load(tier: DiskTier | None, segment: HostedSegment, config: IndexConfig) -> bool:
    """Load keys, values and index from the tier; False if any of them is missing or damaged.

    With another index configuration the keys and values are kept, unless the index learns from
    queries."""
    if tier is None:
        return False
    index = None
    try:
        arrays = tier.get_sidecar(stored_key(segment.key), _SIDECAR)
        if arrays is None or not _read(tier, segment):
            return False
        named = {name: np.asarray(array) for name, array in arrays.items()}
        index = SegmentIndex.load(named, segment)
    except (TierFault, LooseleafError) as error:
        _log.info("a hosted document is not taken from disk as it is: %s", error)
    if index is None or index.config != config:
        # queries are not stored, so an index that learns needs a new prefill
        segment.filled = 0 if config.kind in LEARNING else segment.filled
        return False
    segment.index = index
    return True


def _read(tier: DiskTier, segment: HostedSegment) -> bool:
    """Fill a segment with the keys and values that a tier has; False if it has none that fit."""
    reader = tier.open(stored_key(segment.key))
    if reader is None:
        return False
    try:
        planes = segment.kv.shape[1]
        layout = (planes, 1, *segment.kv.shape[2:]), dtype_name(segment.kv.dtype)
        if (tuple(reader.record.layer_shape), reader.record.dtype) != layout:
            return False
        for layer, memory in enumerate(segment.kv.view(len(segment.kv), -1)):
            raw = memory.view(torch.uint8)
            read = reader.read(layer, raw)
            if read.data_ptr() != raw.data_ptr():
                raw.copy_(read)
    finally:
        reader.close()
    segment.filled = segment.num_tokens
    return True
