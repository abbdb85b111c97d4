"""What `tools.fuzz` does to engines while they work: tiers that are slow or fail, and interrupts as
Ctrl-C makes them, inside calls to tiers and while requests are admitted.

Interrupts come in the thread that steps the engine, as Python's do, before a call or behind it, and
once for each time that trouble is entered; tiers are slow and fail in any thread."""

import functools
import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from looseleaf.engine.documents.host_prefill import HostedPass, HostingJob
from looseleaf.engine.documents.hosting import Hosting
from looseleaf.engine.engine import Engine
from looseleaf.tiers import TierFault
from looseleaf.tiers.stores.disk import DiskTier

_OF_TIERS = ("contains", "open", "put", "delete", "pin")
# whoever is interrupted behind a call has what it gave, but has noted it nowhere yet: only calls
# that book what they give are interrupted there
_BEFORE = {
    "store": ("find", "acquire", "insert", "reserve"),
    "tiers": ("find", "load", "write_back"),
}
_AROUND = {"tiering": ("begin", "settle", "wait", "wake", "keep", "note_read")}
# what the layers of a hosted document call
_OF_PASSES = ("_keep",)
_SECONDS = (0.0, 0.0, 0.0, 0.001, 0.01)
_VERY_SLOW = 0.3
_MOST_CALLS = 60


class Interrupted(KeyboardInterrupt):
    """An interrupt that was planted; says where."""


class Trouble:
    """Trouble of some ``kinds`` for one engine, which has it while this is entered: ``s``, tiers
    are slow; ``f``, they fail; ``i``, interrupts."""

    def __init__(self, engine: Engine, kinds: str, seed: int) -> None:
        self._kinds, self._draw = kinds, random.Random(seed)
        self._lock = threading.Lock()
        self._main = threading.current_thread()
        self._in, self._left = False, 0
        for guard in engine.tiers.guards if engine.tiers is not None else ():
            guard.breaker.cooldown = 0.05
            self._wrap(guard.tier, _OF_TIERS, self._tier_call, _nothing)
            if isinstance(guard.tier, DiskTier):
                opened = guard.tier.open
                guard.tier.open = functools.partial(self._opened, opened)  # type: ignore[method-assign]
        hosted = engine.hosting.tier
        if hosted is not None:
            self._wrap(
                hosted, (*_OF_TIERS, "put_sidecar", "get_sidecar"), self._hosted_call, _nothing
            )
        if "i" in kinds:
            self._interrupt_passes(engine.hosting)
            for name, methods in {**_BEFORE, **_AROUND}.items():
                owner = engine.tiers if name == "tiers" else getattr(engine, name)
                around = self._interrupt if name in _AROUND else _nothing
                if owner is not None:
                    self._wrap(owner, methods, self._interrupt, around)

    def __enter__(self) -> None:
        self._in, self._left = True, self._draw.randint(1, _MOST_CALLS)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._in = False

    def _wrap(
        self,
        owner: object,
        names: tuple[str, ...],
        before: Callable[[str], None],
        behind: Callable[[str], None],
    ) -> None:
        for name in names:
            method = getattr(owner, name)

            @functools.wraps(method)
            def called(*args: Any, _method: Any = method, **named: Any) -> Any:
                before(f"before {_method.__qualname__}")
                result = _method(*args, **named)
                behind(f"behind {_method.__qualname__}")
                return result

            setattr(owner, name, called)

    def _interrupt_passes(self, hosting: Hosting) -> None:
        """Have layers of documents that are hosted interrupted, in what they see and in them."""
        make = hosting._make_pass

        def made(job: HostingJob) -> HostedPass:
            pass_over = make(job)
            pass_over.context = _Watched(self._interrupt)
            self._wrap(pass_over, _OF_PASSES, self._interrupt, self._interrupt)
            return pass_over

        hosting._make_pass = made  # type: ignore[method-assign]

    def _opened(self, open_: Callable[..., Any], *args: Any) -> Any:
        reader = open_(*args)
        if reader is not None:
            self._wrap(reader, ("read",), self._tier_call, _nothing)
        return reader

    def _tier_call(self, where: str) -> None:
        if not self._in:
            return
        self._interrupt(where)
        self._fault(("unavailable", "damaged", "missing", None))

    def _hosted_call(self, where: str) -> None:
        # no guard stands between: such a tier raises nothing but its faults
        if self._in:
            self._fault(("unavailable", "damaged", "missing"))

    def _fault(self, kinds: tuple[Any, ...]) -> None:
        with self._lock:
            chance, seconds = self._draw.random(), self._draw.choice(_SECONDS)
            kind = self._draw.choice(kinds)
        if "s" in self._kinds:
            time.sleep(_VERY_SLOW if chance > 0.995 else seconds)
        if "f" in self._kinds and chance < 0.1:
            raise TierFault(kind, "planted") if kind is not None else RuntimeError("planted")

    def _interrupt(self, where: str) -> None:
        if not self._in or "i" not in self._kinds or threading.current_thread() is not self._main:
            return
        self._left -= 1
        if self._left == 0:
            raise Interrupted(where)


class _Watched(list[Tensor]):
    """A list of what layers keep, each of which may be interrupted."""

    def __init__(self, interrupt: Callable[[str], None]) -> None:
        super().__init__()
        self._interrupt = interrupt

    def append(self, layer: Tensor) -> None:
        """Keep one more."""
        self._interrupt("before a layer of what a document sees")
        super().append(layer)


def damage(path: Path, draw: random.Random) -> None:
    """Flip a bit of a file, cut it, or delete it."""
    content = bytearray(path.read_bytes())
    kind = draw.choice(("flipped", "cut", "deleted"))
    if kind == "deleted" or not content:
        path.unlink()
        return
    place = draw.randrange(len(content))
    content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content if kind == "flipped" else content[:place])


def _nothing(where: str) -> None:
    """Where no interrupt comes."""


def quiet() -> None:
    """Faults that are planted need not be told."""
    for name in ("tiers.guard", "tiers.loader", "engine.hosting", "engine.hosted_records"):
        logging.getLogger(f"looseleaf.{name}").setLevel(logging.CRITICAL)
