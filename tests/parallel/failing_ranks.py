"""Ranks that end before they join the others."""

import os
from multiprocessing.connection import Connection

from looseleaf.parallel import Link


def main(rank: int, file: int) -> None:
    """Rank 1 reports its error; later ranks end without a report."""
    if rank == 1 and os.environ.get("FAILING_RANK") == "reports":
        Link(rank, [Connection(file)]).fail(ImportError("no such library"))
    os._exit(1)
