"""Two ranks in one process: rank 1 follows in a thread, over the same messages and collectives."""

import threading
from functools import partial
from multiprocessing import Pipe
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

from looseleaf.engine.engine import Engine
from looseleaf.llm.llm import make_config
from looseleaf.llm.load import load_rank
from looseleaf.llm.ranks import RankStart, follow, make_rank
from looseleaf.parallel import Link
from looseleaf.parallel.collectives import make_folder
from tests.engine.harness import make_llm


class Pair:
    """An LLM of two ranks, and the engine of rank 1, both in fp32 on a CPU."""

    def __init__(self, folder: Path, **options: Any) -> None:
        config = make_config(
            {"dtype": "float32", "device": "cpu", "num_pages": 96, "tensor_parallel": 2, **options}
        )
        make, (ours, theirs) = partial(load_rank, folder, "auto"), Pipe()
        self._folder = make_folder()
        start = RankStart(make, config, "cpu", self._folder)
        self.other: Engine | None = None
        follower = Link(1, [theirs])

        def run() -> None:
            try:
                self.other = make_rank(start, follower)
                follow(self.other, follower)
            except BaseException as error:
                follower.fail(error)
                follower.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        engine = make_rank(start, Link(0, [ours]))
        with patch("looseleaf.llm.llm.load_engine", return_value=engine):
            self.llm = make_llm(folder)

    def __enter__(self) -> "Pair":
        return self

    def call(self, path: str, *arguments: Any) -> Any:
        """Call a method of both engines; returns after both calls have ended."""
        link = self.llm.engine.ranks.link  # type: ignore[union-attr]
        with link.command(path, *arguments):
            result = attrgetter(path)(self.llm.engine)(*arguments)
        with link.command("ranks.link.agree", "end", True, all):
            link.agree("end", True, all)
        return result

    def forget_pool(self) -> None:
        """Bring all documents to the tiers, and leave nothing in the pools."""
        self.call("tiers.flush", 30.0)
        self.call("tiering.release_pages")
        self.call("store.evict_idle")

    def __exit__(self, *_: object) -> None:
        self.llm.close()
        self._thread.join(10.0)
        assert not self._thread.is_alive()
        if self.other is not None:
            self.other.close()
        assert not self._folder.exists()
