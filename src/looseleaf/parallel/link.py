"""The messages between rank 0 and the other ranks of a host: commands, decisions, agreements.

Messages have an order, and every rank reads them at the same place of its program. A message for
another place means that the ranks' plans differ, which ends the engine."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

from looseleaf.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidOption,
    InvalidRequest,
    LooseleafError,
)

# a rank that fails reports it before it ends
_DIAGNOSIS_SECONDS = 1.0
T = TypeVar("T")
U = TypeVar("U")


class Command(NamedTuple):
    """A method of the engine that all ranks call, by its path, such as ``documents.pin``."""

    path: str
    arguments: Sequence[Any] = ()
    options: Any = None


class Decision(NamedTuple):
    """The value that rank 0 chose at ``place``, or the error that it raises there."""

    place: str
    value: Any = None
    error: LooseleafError | None = None


class Failure(NamedTuple):
    """The error that ends a rank."""

    message: str


class Link:
    """The connections of one rank: rank 0 has one to each other rank, these have one to rank 0."""

    def __init__(self, rank: int, connections: Sequence[Connection]) -> None:
        self.rank = rank
        self._connections = connections
        self._depth = 0
        # the error that ended the ranks
        self._error: EngineFault | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @contextlib.contextmanager
    def command(self, path: str, *arguments: Any, **options: Any) -> Iterator[None]:
        """Have the other ranks call the method ``path`` too; commands inside it are theirs already.

        Raises EngineFault after a fault in any command, because the ranks are then at different
        places. On other ranks this has no effect."""
        if self._depth or not self.is_first:
            yield
            return
        if self._error is not None:
            raise self._error
        self._depth += 1
        try:
            self._send(Command(path, arguments, options))
            yield
        except (InvalidRequest, InvalidOption, DeadlineExceeded):
            # all ranks refuse it
            raise
        except BaseException as error:
            self._error = self._diagnose(error)
            if isinstance(error, Exception):
                raise self._error from error
            raise
        finally:
            self._depth -= 1

    def _diagnose(self, error: BaseException) -> EngineFault:
        """The error of the first rank that has ended, or else ``error``."""
        for rank, connection in enumerate(self._connections, 1):
            try:
                while connection.poll(_DIAGNOSIS_SECONDS):
                    message = connection.recv()
                    if isinstance(message, Failure):
                        return failed(rank, message.message)
            except (EOFError, OSError):
                return lost(rank)
        if isinstance(error, EngineFault):
            return error
        return failed(self.rank, f"{type(error).__name__}: {error}")

    def receive(self) -> Command | None:
        """The next command of rank 0; None after its end."""
        try:
            message = self._connections[0].recv()
        except (EOFError, OSError):
            return None
        if not isinstance(message, Command):
            raise _differ(self.rank, "a command", message)
        return message

    def decide(self, place: str, choose: Callable[[], T]) -> T:
        """The result of ``choose`` on rank 0, or its error, on every rank."""
        if not self.is_first:
            message: T = self._decision(place)
            return message
        value = self._try(place, choose)
        self._send(Decision(place, value))
        return value

    def attempt(self, place: str, make: Callable[[], T]) -> T | None:
        """The result of ``make``, which only rank 0 calls; None on other ranks.

        Every rank raises its error."""
        if not self.is_first:
            self._decision(place)
            return None
        value = self._try(place, make)
        self._send(Decision(place))
        return value

    def agree(self, place: str, value: T, combine: Callable[[list[T]], U]) -> U:
        """The combination of all ranks' values, in their order, on every rank."""
        if not self.is_first:
            self._send(Decision(place, value))
            agreed: U = self._decision(place)
            return agreed
        values = [value]
        for rank, connection in enumerate(self._connections, 1):
            values.append(self._read(rank, connection, place))
        agreed = combine(values)
        self._send(Decision(place, agreed))
        return agreed

    def fail(self, error: BaseException) -> None:
        """Report the error that ends this rank."""
        with contextlib.suppress(OSError):
            self._send(Failure(f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        """Close all connections, which ends the other ranks."""
        for connection in self._connections:
            connection.close()

    def _try(self, place: str, choose: Callable[[], T]) -> T:
        try:
            return choose()
        except LooseleafError as error:
            self._send(Decision(place, error=error))
            raise

    def _decision(self, place: str) -> Any:
        return self._read(0, self._connections[0], place)

    def _read(self, rank: int, connection: Connection, place: str) -> Any:
        try:
            message = connection.recv()
        except (EOFError, OSError) as error:
            raise lost(rank) from error
        if isinstance(message, Failure):
            raise failed(rank, message.message)
        if not isinstance(message, Decision) or message.place != place:
            raise _differ(rank, place, message)
        if message.error is not None:
            raise message.error
        return message.value

    def _send(self, message: Command | Decision | Failure) -> None:
        for rank, connection in enumerate(self._connections, 1):
            try:
                connection.send(message)
            except OSError as error:
                raise lost(rank if self.is_first else 0) from error


def failed(rank: int, message: str) -> EngineFault:
    """The error of an engine whose rank has failed with ``message``."""
    return EngineFault(
        f"rank {rank} of the engine failed ({message}), so all of its requests ended: start a new "
        "engine"
    )


def lost(rank: int) -> EngineFault:
    """The error of an engine whose rank has ended."""
    return EngineFault(
        f"rank {rank} of the engine has ended, so all of its requests ended: start a new engine"
    )


def _differ(rank: int, place: str, message: object) -> EngineFault:
    name = message.place if isinstance(message, Decision) else type(message).__name__
    return EngineFault(
        f"the ranks' plans differ (rank {rank} is at {name!r}, not at {place!r}): please report it"
    )
