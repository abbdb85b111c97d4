"""API keys, tenants and what each key may use."""

from collections import deque
from contextlib import ExitStack
from pathlib import Path

import pytest

from looseleaf.config import ServerConfig
from looseleaf.errors import InvalidOption
from looseleaf.server.errors import ApiError
from looseleaf.server.keys import KeyRing, exposure, is_loopback, read_keys
from looseleaf.server.limits import KeyLimits, Queue
from looseleaf.server.service import make_service, require_safe


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\nred = red-key-0001\nred=red-key-0002\n")
    ring = read_keys(path, "blue=blue-key-0001,green=green-key-01")
    assert ring.tenants == {"red", "blue", "green"}
    callers = [ring.find(f"Bearer {key}") for key in ("red-key-0001", "red-key-0002")]
    assert callers[0].salt == callers[1].salt != ring.find("bearer blue-key-0001").salt
    assert callers[0].key != callers[1].key, "limits are a key's own"


@pytest.mark.parametrize(
    "line", ["red", "red=", "red=short", "=key-000001", "r d=key-000001", "red=key 000001"]
)
def test_a_line_that_is_no_key_is_refused_without_showing_it(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"blue=blue-key-0001\n{line}\n")
    with pytest.raises(InvalidOption, match=r"keys:2: write TENANT=KEY") as caught:
        read_keys(path, None)
    assert "000001" not in str(caught.value)


def test_a_key_of_two_tenants_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="given before"):
        read_keys(None, "red=the-same-key,blue=the-same-key")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602])
def test_a_file_of_keys_that_others_can_read_is_told_or_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text("red=red-key-0001\n")
    for private in (0o600, 0o400):
        path.chmod(private)
        assert exposure(path) is None
    path.chmod(mode)
    told = exposure(path)
    assert told is not None and f"mode {mode:o}" in told and "chmod 600" in told
    config = ServerConfig(port=0, api_keys=str(path), strict_permissions=True)
    with pytest.raises(InvalidOption, match="or drop --strict-permissions"):
        make_service(str(tmp_path / "no-model"), config)


def test_keys_that_are_asked_for_and_empty_are_no_open_server(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none yet\n")
    with pytest.raises(InvalidOption, match="empty"):
        read_keys(path, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_an_open_server_is_for_the_loopback_only(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(InvalidOption, match="API keys are needed"):
        require_safe(ServerConfig(host=host), KeyRing({}))
    require_safe(ServerConfig(host=host), read_keys(None, "red=red-key-0001"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_the_loopback_may_be_open_unless_that_is_forbidden(host: str) -> None:
    require_safe(ServerConfig(host=host), KeyRing({}))
    with pytest.raises(InvalidOption, match="no-open-loopback"):
        require_safe(ServerConfig(host=host, open_loopback=False), KeyRing({}))


def test_a_bucket_fills_again_with_time() -> None:
    now = [0.0]
    limits = KeyLimits(60, None, lambda: now[0])

    def ask() -> bool:
        try:
            with limits.hold("key"):
                return True
        except ApiError as error:
            assert error.headers is not None
            assert int(error.headers["Retry-After"]) >= 1
            return False

    assert [ask() for _ in range(61)] == [True] * 60 + [False]
    now[0] += 2.0
    assert [ask() for _ in range(3)] == [True, True, False]
    now[0] += 1e6
    assert [ask() for _ in range(61)] == [True] * 60 + [False]


def test_a_request_under_way_holds_its_place_until_it_ends() -> None:
    limits = KeyLimits(None, 1)
    with limits.hold("red"):
        with limits.hold("blue"):
            pass
        with pytest.raises(ApiError), limits.hold("red"):
            pass
    with limits.hold("red"):
        pass


def test_the_queue_refuses_for_now_what_may_fit_later_and_for_ever_what_never_will() -> None:
    queue = Queue(1, 2)
    with queue.reserve(2):
        with pytest.raises(ApiError) as later, queue.reserve(2):
            pass
        with queue.reserve(1):
            assert queue.reserved == 3
    with pytest.raises(ApiError) as never, queue.reserve(4):
        pass
    assert (later.value.status_code, never.value.status_code) == (429, 400)
    assert queue.reserved == 0


def test_who_finds_the_queue_full_is_told_how_long_those_in_it_take_and_not_their_waits_twice() -> (
    None
):
    now, seconds, running, waiting = 0.0, 4.0, 2, 6
    queue = Queue(running, waiting, lambda: now)
    held = deque[ExitStack]()
    for _ in range(100):
        while queue.reserved < running + waiting:
            held.append(ExitStack())
            held[-1].enter_context(queue.reserve(1))
        now += seconds
        for _ in range(running):
            held.popleft().close()
    for _ in range(running):
        held.append(ExitStack())
        held[-1].enter_context(queue.reserve(1))
    with pytest.raises(ApiError) as later, queue.reserve(1):
        pass
    assert later.value.headers is not None
    taken = (running + waiting) / running * seconds
    assert taken <= int(later.value.headers["Retry-After"]) < 1.25 * taken
