"""An S3-compatible server of the tests' own: moto's, on loopback, in this process."""

import os
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import pytest
from moto.server import ThreadedMotoServer

_NUMBERS = count()


@dataclass(eq=False)
class S3Server:
    """A server with a fresh bucket."""

    server: ThreadedMotoServer
    port: int
    bucket: str

    @property
    def url(self) -> str:
        endpoint = f"http://127.0.0.1:{self.port}"
        return f"s3://{self.bucket}/cache?endpoint={endpoint}&region=us-east-1"


@pytest.fixture(scope="session")
def moto_server() -> Iterator[tuple[ThreadedMotoServer, int]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server, server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def s3_server(
    moto_server: tuple[ThreadedMotoServer, int], monkeypatch: pytest.MonkeyPatch
) -> S3Server:
    """An empty bucket, and credentials in the environment."""
    server, port = moto_server
    bucket = f"bucket-{os.getpid()}-{next(_NUMBERS)}"
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{bucket}", method="PUT")
    urllib.request.urlopen(request).close()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    return S3Server(server, port, bucket)
