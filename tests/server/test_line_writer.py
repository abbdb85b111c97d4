"""The log does not keep anybody waiting: neither a reader that stalls nor one that has gone."""

import json
import threading

from looseleaf.config import ServerConfig
from looseleaf.server.line_writer import LineWriter
from looseleaf.server.logs import make_log
from tests.server.test_ending import running


class Stalled:
    """A stream whose reader reads only when it is let to."""

    def __init__(self) -> None:
        self.reached, self.opened, self.text = threading.Event(), threading.Event(), ""

    def write(self, text: str) -> None:
        self.reached.set()
        assert self.opened.wait(60)
        self.text += text

    def flush(self) -> None:
        pass


class Gone(Stalled):
    """A stream whose reader has gone."""

    def write(self, text: str) -> None:
        self.reached.set()
        raise BrokenPipeError


def test_what_a_stalled_reader_does_not_take_is_dropped_and_counted() -> None:
    stream = Stalled()
    writer = LineWriter(stream, capacity=2)
    log = make_log(ServerConfig(), writer)
    log.info("first")
    assert stream.reached.wait(60)
    # the first is being written, two wait, three find no place
    for number in range(5):
        log.info("more", number=number)
    stream.opened.set()
    while writer.is_full:
        pass
    log.info("last")
    writer.close(60)
    lines = [json.loads(line) for line in stream.text.splitlines()]
    assert [line["event"] for line in lines] == ["first", "more", "more", "last"]
    assert lines[-1]["lines_dropped"] == 3


def test_the_end_does_not_wait_for_a_stalled_reader_and_a_reader_that_has_gone_harms_nobody() -> (
    None
):
    stalled, gone = Stalled(), Gone()
    for stream in (stalled, gone):
        writer = LineWriter(stream)
        log = make_log(ServerConfig(), writer)
        log.info("first")
        assert stream.reached.wait(60)
        log.info("second")
        writer.close(0.01)
    stalled.opened.set()


def test_a_server_whose_log_is_not_read_answers_and_ends_whole() -> None:
    with running() as server:
        path = "/v1/" + "x" * 600
        for _ in range(300):
            assert server.client.get(path).status_code == 404
        assert server.client.get("/health").is_success
        server.process.terminate()
        # its pipe is full and stays so
        assert server.process.wait(60) == 0


def test_a_server_whose_log_reader_has_gone_ends_whole() -> None:
    with running() as server:
        assert server.process.stderr is not None
        server.process.stderr.close()
        server.process.stderr = None
        assert server.client.get("/v1/models").is_success
        server.process.terminate()
        assert server.process.wait(60) == 0
