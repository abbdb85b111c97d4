"""A reader of a record's file, and system errors as tier faults."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from jaxtyping import UInt8
from torch import Tensor

from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.stores.base import Fault, Record, TierFault
from looseleaf.tiers.stores.files import RecordHeader, raw

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# errors of the machine or of a whole file system
_SYSTEM_ERRORS = (
    *_FULL,
    errno.EAGAIN,
    errno.EINTR,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOTCONN,
    errno.EROFS,
    errno.ESTALE,
    errno.ETIMEDOUT,
)


@dataclass(eq=False)
class DiskReader:
    """An open file, readable to its end even if it is deleted meanwhile. ``record_faults`` converts
    errors of the file to faults."""

    file: int
    header: RecordHeader
    drop_damaged: Callable[[SegmentKey], None]
    record_faults: Callable[[SegmentKey], AbstractContextManager[None]]

    @property
    def record(self) -> Record:
        return self.header.record

    def read(
        self, layer: int, into: UInt8[Tensor, " layer_bytes"]
    ) -> UInt8[Tensor, " layer_bytes"]:
        """Reads and checks a layer. A damaged record is deleted."""
        size = self.record.layer_bytes
        target = raw(into)
        num_read = 0
        try:
            with disk_faults(), self.record_faults(self.record.key):
                while num_read < size:
                    offset = self.header.size + layer * size + num_read
                    count = os.preadv(self.file, [target[num_read:]], offset)
                    if not count:
                        raise TierFault("damaged", "the file ends too early")
                    num_read += count
                self.header.check_layer(layer, into)
        except TierFault as fault:
            if fault.kind == "damaged":
                self.drop_damaged(self.record.key)
            raise
        return into

    def close(self) -> None:
        os.close(self.file)


@contextmanager
def disk_faults() -> Iterator[None]:
    """Converts OSError to TierFault."""
    try:
        yield
    except OSError as error:
        kind: Fault = "full" if error.errno in _FULL else "unavailable"
        raise TierFault(kind, f"disk: {error}") from error


def is_file_error(error: OSError) -> bool:
    """Whether an error may concern one file of a sound folder."""
    return error.errno not in _SYSTEM_ERRORS
