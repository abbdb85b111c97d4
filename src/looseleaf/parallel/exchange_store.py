"""The store over which ranks exchange the addresses of peer memory.

PyTorch names the keys of an exchange by a number, which it counts in each process over all groups.
Rank 0 lives in the caller's process, which may have had engines before. The other ranks are new
processes. So the numbers of one group differ, and without this store its ranks wait for keys that
no rank writes."""

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

# "name/number/rank"
_KEY = re.compile(r"(.*)/(\d+)/(\d+)")
_WAIT = timedelta(seconds=60)


class ExchangeStore(Store):
    """``store``, in which the numbers of keys count from this group's first exchange on.

    PyTorch keeps no reference to this object, so the caller has to."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._first: dict[str, int] = {}

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(self._own(key))
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta = _WAIT) -> None:
        """Raises RuntimeError after ``timeout``."""
        self._store.wait([self._own(key) for key in keys], timeout)

    def _own(self, key: str) -> str:
        match = _KEY.fullmatch(key)
        if match is None:
            return key
        name, number, rank = match.groups()
        first = self._first.setdefault(name, int(number))
        return f"{name}/{int(number) - first}/{rank}"
