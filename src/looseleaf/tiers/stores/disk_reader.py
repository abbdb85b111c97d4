"""An open file of a record, read layer by layer, and errors of the system as a tier's faults."""

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
# errors of the machine or of a whole file system, whichever file was asked for
_NOT_OF_A_FILE = (
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
    """An open file; it can be read to its end even if it is deleted meanwhile. ``of_record`` turns
    errors of its file into faults."""

    file: int
    header: RecordHeader
    drop_damaged: Callable[[SegmentKey], None]
    of_record: Callable[[SegmentKey], AbstractContextManager[None]]

    @property
    def record(self) -> Record:
        return self.header.record

    def read(
        self, layer: int, into: UInt8[Tensor, " layer_bytes"]
    ) -> UInt8[Tensor, " layer_bytes"]:
        """The layer from the file, if it is what was stored; a damaged record is dropped."""
        size = self.record.layer_bytes
        target = raw(into)
        done = 0
        try:
            with disk_faults(), self.of_record(self.record.key):
                while done < size:
                    at = self.header.size + layer * size + done
                    got = os.preadv(self.file, [target[done:]], at)
                    if not got:
                        raise TierFault("damaged", "the file ends too early")
                    done += got
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
    """What the system refuses, as a TierFault."""
    try:
        yield
    except OSError as error:
        kind: Fault = "full" if error.errno in _FULL else "unavailable"
        raise TierFault(kind, f"disk: {error}") from error


def is_of_file(error: OSError) -> bool:
    """Whether an error may be that of one file, in a folder that is well."""
    return error.errno not in _NOT_OF_A_FILE
