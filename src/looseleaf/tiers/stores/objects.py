"""Records in an S3-compatible object store that several engines and machines share.

A record is one object in the file format of `looseleaf.tiers.stores.files`, so it is complete or
absent. Layers are read by ranges. Failed calls are repeated with random back-off within the tier's
time limit. Needs the package ``obstore``; credentials come from the usual variables (``AWS_…``)."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from jaxtyping import UInt8
from torch import Tensor

from looseleaf.errors import InvalidOption, install
from looseleaf.kv.keys import SegmentKey
from looseleaf.tiers.stores.base import Entry, Record, TierCounters, TierFault
from looseleaf.tiers.stores.files import (
    RecordHeader,
    decode_record,
    encode_record,
    header_size,
    raw,
)

SCHEME = "s3"
_SEGMENTS, _CLAIMS = "looseleaf/1/segment/", "looseleaf/1/claim/"
_FIRST_BYTES = 1 << 18
"""Bytes of the first read: the header, and all layers of a small record."""

_SINGLE_PUT = 64 << 20
"""Larger records are sent in parts, without the check that no other engine has stored them."""

_OPTIONS = ("endpoint", "region")


@dataclass(eq=False)
class ObjectTier:
    """Records below ``s3://BUCKET/PREFIX?endpoint=URL&region=NAME``.

    ``timeout`` bounds each call with its repetitions, in seconds. Records older than ``ttl``
    seconds count as absent. Connections open on first use. Raises InvalidOption for an invalid URL,
    and without the package."""

    url: str
    timeout: float = 5.0
    ttl: float | None = None
    name: str = "remote"
    counters: TierCounters = field(default_factory=TierCounters)
    _pinned: set[SegmentKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._store = _connect(self.url, self.timeout)

    def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        """Whether each record exists, one call each."""
        return [self._size(key) is not None for key in keys]

    def open(self, key: SegmentKey) -> "ObjectReader | None":
        """A reader of the record after its header is checked. A damaged record is deleted."""
        size = self._size(key)
        if size is None:
            return None
        first = self.read_range(key, 0, min(size, _FIRST_BYTES))
        try:
            length = header_size(first[:8])
            if length > len(first):
                first = self.read_range(key, 0, min(size, length))
            header = decode_record(first[:length], key)
            if header.file_size != size:
                raise TierFault("damaged", "the object is not as long as it was")
        except TierFault as fault:
            if fault.kind == "damaged":
                self.delete([key])
            raise
        return ObjectReader(self, header, first)

    def put(self, record: Record, layers: UInt8[Tensor, "layers layer_bytes"]) -> bool:
        """Writes a record. Of several engines one succeeds; the others return False."""
        import obstore

        if self._size(record.key) is not None:
            return False
        header = encode_record(record, layers)
        path, total = _path(record.key), len(header) + record.num_bytes
        with _faults():
            if total <= _SINGLE_PUT:
                content = b"".join([header, raw(layers.contiguous().view(-1))])
                mode: Any = "create" if self.ttl is None else "overwrite"
                try:
                    obstore.put(self._store, path, content, mode=mode, use_multipart=False)
                except obstore.exceptions.AlreadyExistsError:
                    return False
            else:
                parts = (raw(layers[layer].contiguous()) for layer in range(record.num_layers))
                obstore.put(self._store, path, iter([header, *map(bytes, parts)]))
        self.counters.stored += 1
        self.counters.bytes_written += total
        return True

    def delete(self, keys: Sequence[SegmentKey]) -> int:
        import obstore

        present = [_path(key) for key in keys if self._size(key) is not None]
        if present:
            with _faults():
                obstore.delete(self._store, present)
        return len(present)

    def entries(self) -> Iterable[Entry]:
        """All records, unordered."""
        import obstore

        with _faults():
            for batch in obstore.list(self._store, prefix=_SEGMENTS):
                for item in batch:
                    key = _key(item["path"])
                    if key is not None:
                        created = item["last_modified"].timestamp()
                        tenant = self._tenant(key, item["size"])
                        pinned = key in self._pinned
                        yield Entry(key, item["size"], tenant, created, pinned)

    def pin(self, key: SegmentKey, pinned: bool) -> None:
        """A pinned record does not expire for this process; the store's own rules still hold."""
        (self._pinned.add if pinned else self._pinned.discard)(key)

    def close(self) -> None:
        """Does nothing: connections close with the process."""

    def read_range(self, key: SegmentKey, start: int, length: int) -> bytes:
        """Bytes of a record. Raises TierFault."""
        import obstore

        with _faults():
            content = obstore.get_range(self._store, _path(key), start=start, length=length)
            return bytes(content)

    def verify(self) -> Iterator[tuple[str, TierFault | None]]:
        """Reads every record; yields its name and its fault, None if sound."""
        for entry in list(self.entries()):
            problem = None
            try:
                reader = self.open(entry.key)
                if reader is not None:
                    into = torch.empty(reader.record.layer_bytes, dtype=torch.uint8)
                    for layer in range(reader.record.num_layers):
                        reader.read(layer, into)
            except TierFault as fault:
                if fault.kind not in ("damaged", "missing"):
                    raise
                problem = fault
            yield entry.key.hex(), problem

    def discard(self, names: Iterable[str]) -> None:
        """Deletes records by the names of `verify`."""
        self.delete([SegmentKey(bytes.fromhex(name)) for name in names])

    def claim(self, key: SegmentKey, owner: str, seconds: float) -> bool:
        """Announce that ``owner`` computes a segment; False while another's claim is valid.

        A claim older than ``seconds`` is taken over by one engine."""
        import obstore

        path = _CLAIMS + key.hex()
        with _faults():
            try:
                obstore.put(self._store, path, owner.encode(), mode="create")
                return True
            except obstore.exceptions.AlreadyExistsError:
                pass
            try:
                current = obstore.get(self._store, path)
                meta, is_own = current.meta, bytes(current.bytes()) == owner.encode()
                if not is_own and time.time() - meta["last_modified"].timestamp() < seconds:
                    return False
                tag: Any = {"e_tag": meta["e_tag"]}
                if is_own:
                    tag = "overwrite"
                obstore.put(self._store, path, owner.encode(), mode=tag)
                return True
            except (FileNotFoundError, obstore.exceptions.PreconditionError):
                # another engine was faster
                return False

    def release(self, key: SegmentKey, owner: str) -> None:
        """End a claim of ``owner``."""
        import obstore

        path = _CLAIMS + key.hex()
        with _faults():
            try:
                if bytes(obstore.get(self._store, path).bytes()) == owner.encode():
                    obstore.delete(self._store, path)
            except FileNotFoundError:
                return

    def _size(self, key: SegmentKey) -> int | None:
        """Bytes of a record; None if it is absent or has expired."""
        import obstore

        with _faults():
            try:
                meta = obstore.head(self._store, _path(key))
            except FileNotFoundError:
                return None
        age = time.time() - meta["last_modified"].timestamp()
        expired = self.ttl is not None and age > self.ttl and key not in self._pinned
        return None if expired else int(meta["size"])

    def _tenant(self, key: SegmentKey, size: int) -> str:
        """The tenant of a record; empty if it is damaged."""
        try:
            first = self.read_range(key, 0, min(size, _FIRST_BYTES))
            return decode_record(first[: header_size(first[:8])], key).record.tenant
        except TierFault as fault:
            if fault.kind not in ("damaged", "missing"):
                raise
            return ""


@dataclass(frozen=True)
class ObjectReader:
    """A record in the store; ``first`` are its first bytes."""

    tier: ObjectTier
    header: RecordHeader
    first: bytes = field(repr=False)

    @property
    def record(self) -> Record:
        return self.header.record

    def read(
        self, layer: int, into: UInt8[Tensor, " layer_bytes"]
    ) -> UInt8[Tensor, " layer_bytes"]:
        """Reads and checks a layer. A damaged record is deleted."""
        size, key = self.record.layer_bytes, self.record.key
        start = self.header.size + layer * size
        try:
            content: bytes | memoryview = memoryview(self.first)[start : start + size]
            if len(content) < size:
                content = self.tier.read_range(key, start, size)
            if len(content) != size:
                raise TierFault("damaged", f"layer {layer} is not as long as it was")
            into.numpy()[:] = memoryview(content)
            self.header.check_layer(layer, into)
        except TierFault as fault:
            if fault.kind == "damaged":
                self.tier.delete([key])
            raise
        return into

    def close(self) -> None:
        """Does nothing: the connection stays open."""


def _path(key: SegmentKey) -> str:
    return _SEGMENTS + key.hex()


def _key(path: str) -> SegmentKey | None:
    """The segment key of an object; None for a foreign one."""
    try:
        key = SegmentKey(bytes.fromhex(path.removeprefix(_SEGMENTS)))
    except ValueError:
        return None
    return key if _path(key) == path else None


def _connect(url: str, timeout: float) -> Any:
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise InvalidOption(
            f"an object store needs the package obstore: {install('s3')}", "remote_url"
        ) from error
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    unknown = sorted(set(query) - {*_OPTIONS})
    if parts.scheme != SCHEME or not parts.hostname or unknown or parts.password:
        raise InvalidOption(
            f"the object store's URL can't have {unknown[0]}"
            if unknown
            else "the object store's URL can't be read: write s3://BUCKET/PREFIX?endpoint=URL, and "
            "give credentials by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            "remote_url",
        )
    options: Any = dict(query)
    endpoint = query.get("endpoint", "")
    retry_timeout = timedelta(seconds=timeout)
    return S3Store(
        parts.netloc,
        prefix=parts.path.strip("/") or None,
        virtual_hosted_style_request=False,
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "timeout": retry_timeout,
            "connect_timeout": min(retry_timeout, timedelta(seconds=2)),
        },
        retry_config={
            "max_retries": 3,
            "retry_timeout": retry_timeout,
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=1),
                "base": 2,
            },
        },
        **options,
    )


@contextmanager
def _faults() -> Iterator[None]:
    """Converts the client's errors to TierFault, except those that callers expect."""
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

    try:
        yield
    except FileNotFoundError as error:
        raise TierFault("missing", "remote: the store has dropped the record") from error
    except (AlreadyExistsError, PreconditionError) as error:
        raise TierFault("unavailable", f"remote: {_short(error)}") from error
    except BaseError as error:
        text = str(error).lower()
        kind: Any = "timeout" if "timed out" in text or "timeout" in text else "unavailable"
        if "416" in text:
            kind = "damaged"
        raise TierFault(kind, f"remote: {_short(error)}") from error
    except OSError as error:
        raise TierFault("unavailable", f"remote: {_short(error)}") from error


def _short(error: BaseException) -> str:
    """The first line of a client's error, which has no credentials."""
    return str(error).partition("\n")[0][:300]
