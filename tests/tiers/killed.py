"""Writers that are killed with -9 while they write; what they leave must be clean. Run as a
process of its own: it forks. Kills so often, and up to ten times as often until one has met a file
that was not finished; prints how many have."""

import os
import random
import signal
import sys
import time
from pathlib import Path

from looseleaf.tiers import DiskTier, Ledger
from tests.tiers.records import content, key, record


def write_for_ever(folder: Path, seed: int) -> None:
    """Store, drop and store again, with side-cars."""
    tier, rng = DiskTier(folder, Ledger(1 << 26)), random.Random(seed)
    while True:
        number = rng.randrange(6)
        tier.put(record(number), content(number))
        tier.put_sidecar(key(number), "bounds", {"low": content(number)})
        if rng.random() < 0.5:
            tier.delete([key(rng.randrange(6))])


def await_writing(unfinished: Path, more: float) -> None:
    """Return once a file is being written, and ``more`` seconds later. Raises TimeoutError."""
    end = time.monotonic() + 20.0
    while not (unfinished.is_dir() and any(unfinished.iterdir())):
        if time.monotonic() > end:
            raise TimeoutError("the writer wrote nothing in 20 seconds")
    end = time.monotonic() + more
    while time.monotonic() < end:
        pass


def main(folder: Path, kills: int) -> None:
    rng, unfinished = random.Random(11), 0
    for seed in range(10 * kills):
        if seed >= kills and unfinished:
            break
        child = os.fork()
        if not child:
            try:
                write_for_ever(folder, seed)
            finally:
                os._exit(1)
        await_writing(folder / "unfinished", rng.choice((0.0, 0.001, 0.01)))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        unfinished += any((folder / "unfinished").iterdir())
        tier = DiskTier(folder, Ledger(1 << 26))
        wrong = [(name, why) for name, why in tier.verify() if why]
        assert not wrong, wrong
        assert not any((folder / "unfinished").iterdir())
        for entry in tier.entries():
            number = int.from_bytes(entry.key, "big")
            reader = tier.open(entry.key)
            assert reader is not None
            for layer, right in enumerate(content(number)):
                assert (reader.read(layer, right.clone()) == right).all()
            reader.close()
    print(unfinished)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
