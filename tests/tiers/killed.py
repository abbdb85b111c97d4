"""Writers that are killed with -9 at random moments; what they leave must be clean. Run as a
process of its own: it forks. Prints how many kills met a file that was not finished."""

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


def main(folder: Path, kills: int) -> None:
    rng, unfinished = random.Random(11), 0
    for seed in range(kills):
        child = os.fork()
        if not child:
            try:
                write_for_ever(folder, seed)
            finally:
                os._exit(1)
        time.sleep(rng.uniform(0.005, 0.03))
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
