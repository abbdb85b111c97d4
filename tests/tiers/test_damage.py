"""A file or a field that is not what was stored is found out, dropped, and never read as if it
were."""

import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from looseleaf.tiers import DiskTier, Ledger, RemoteTier, TierFault
from tests.tiers.records import content, key, put, read
from tests.tiers.redis_server import RedisServer

TRIALS = 200


def harm(data: bytearray, rng: random.Random) -> bytes:
    """Flip bits, cut, lengthen, or overwrite a stretch."""
    if not data:
        return rng.randbytes(9)
    way = rng.choice(["flip", "flip", "flips", "cut", "longer", "zeros", "noise", "empty"])
    if way in ("flip", "flips"):
        for _ in range(1 if way == "flip" else rng.randint(2, 40)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del data[rng.randrange(len(data)) :]
    elif way == "longer":
        data += rng.randbytes(rng.randint(1, 500))
    elif way == "empty":
        data.clear()
    else:
        start = rng.randrange(len(data))
        stop = min(len(data), start + rng.randint(1, 600))
        data[start:stop] = bytes(stop - start) if way == "zeros" else rng.randbytes(stop - start)
    return bytes(data)


def test_a_file_that_was_harmed_in_any_way_is_a_fault_and_then_gone(tmp_path: Path) -> None:
    tier, rng, faults = DiskTier(tmp_path, Ledger(1 << 20)), random.Random(0), 0
    put(tier, 1)
    (path,) = tmp_path.glob("*.segment")
    sound = path.read_bytes()
    for _ in range(TRIALS):
        harmed = harm(bytearray(sound), rng)
        path.write_bytes(harmed)
        if harmed == sound:
            continue
        assert [wrong is None for _, wrong in tier.verify()] == [False]
        with pytest.raises(TierFault) as caught:
            read(tier, 1)
        assert caught.value.kind == "damaged"
        assert not path.exists()
        assert read(tier, 1) is None
        faults += 1
        assert put(tier, 1)
        found = read(tier, 1)
        assert found is not None and torch.equal(found, content(1))
    assert faults > TRIALS // 2


def test_a_sidecar_that_was_harmed_is_a_fault_and_then_gone(tmp_path: Path) -> None:
    tier, rng = DiskTier(tmp_path, Ledger(1 << 20)), random.Random(1)
    put(tier, 1)
    arrays = {"low": torch.arange(100.0), "high": torch.arange(7)}
    for _ in range(TRIALS):
        tier.put_sidecar(key(1), "bounds", arrays)
        (path,) = tmp_path.glob("*.sidecar")
        sound = path.read_bytes()
        path.write_bytes(harm(bytearray(sound), rng))
        if path.read_bytes() == sound:
            continue
        assert any(wrong for _, wrong in tier.verify())
        with pytest.raises(TierFault):
            tier.get_sidecar(key(1), "bounds")
        assert tier.get_sidecar(key(1), "bounds") is None


def test_a_field_that_was_harmed_at_the_server_is_a_fault_and_then_gone(
    redis_server: RedisServer,
) -> None:
    import redis

    client = redis.Redis(port=redis_server.port)
    tier, rng = RemoteTier(redis_server.url), random.Random(2)
    name = f"looseleaf:1:segment:{key(1).hex()}"
    for _ in range(TRIALS // 4):
        put(tier, 1)
        field = rng.choice([b"header", b"0", b"1", b"2"])
        sound = client.hget(name, field)
        harmed = harm(bytearray(sound), rng)
        client.hset(name, field, harmed)
        if harmed == sound:
            continue
        assert [wrong is None for _, wrong in tier.verify()] == [False]
        assert not client.exists(name)
        put(tier, 1)
        client.hset(name, field, harmed)
        with pytest.raises(TierFault):
            read(tier, 1)
        assert read(tier, 1) is None
    put(tier, 1)
    client.hdel(name, "1")
    with pytest.raises(TierFault, match="dropped layer 1"):
        read(tier, 1)
    assert not client.exists(name), "or nobody would write it anew"
    assert put(tier, 1)
    client.set(name, "a string")
    assert [e.key for e in tier.entries()] == [key(1)]
    with pytest.raises(TierFault) as caught:
        read(tier, 1)
    assert caught.value.kind == "damaged" and put(tier, 1)
    client.close()
    tier.close()


def test_a_record_of_another_version_or_another_segment_is_not_read(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, Ledger(1 << 20))
    put(tier, 1)
    (path,) = tmp_path.glob("*.segment")
    # under the name of another segment the checksums are all right
    shutil.copy(path, tmp_path / f"{key(2).hex()}.segment")
    with pytest.raises(TierFault, match="another segment"):
        read(tier, 2)
    put(tier, 1)
    newer = path.read_bytes().replace(b'"version":"1"', b'"version":"2"', 1)
    path.write_bytes(newer)
    with pytest.raises(TierFault, match="version 1"):
        read(tier, 1)


def test_a_disk_that_is_full_or_refuses_leaves_nothing_half_written(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, Ledger(1 << 30))

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("looseleaf.tiers.stores.disk.os.write", refuse)
        with pytest.raises(TierFault) as caught:
            put(tier, 1)
    assert caught.value.kind == "full"
    assert tier.ledger.used == 0 and read(tier, 1) is None
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    assert put(tier, 1)


def test_a_folder_that_can_not_be_made_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierFault) as caught:
        DiskTier(tmp_path / "file" / "cache", Ledger(1 << 20))
    assert caught.value.kind == "unavailable"


def test_a_server_that_is_gone_is_a_fault_and_one_that_is_back_is_used(
    redis_server: RedisServer,
) -> None:
    own = RedisServer.on_a_free_port()
    own.start()
    tier = RemoteTier(own.url, timeout=2.0)
    put(tier, 1)
    own.kill()
    for call in (lambda: tier.contains([key(1)]), lambda: read(tier, 1), lambda: put(tier, 1)):
        with pytest.raises(TierFault) as caught:
            call()
        assert caught.value.kind == "unavailable"
    own.start()
    try:
        assert tier.contains([key(1)]) == [False]
        assert put(tier, 1)
        assert read(tier, 1) is not None
    finally:
        tier.close()
        own.kill()


def test_a_server_without_memory_is_full() -> None:
    own = RedisServer.on_a_free_port()
    own.start("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    tier = RemoteTier(own.url, timeout=2.0)
    try:
        with pytest.raises(TierFault) as caught:
            for number in range(1000):
                put(tier, number)
        assert caught.value.kind == "full"
    finally:
        tier.close()
        own.kill()


def test_writers_killed_at_any_moment_leave_a_folder_that_verify_calls_clean(
    tmp_path: Path,
) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.tiers.killed", str(tmp_path), "30"]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    # if no kill ever met a file in the making, this has tested nothing
    assert int(done.stdout) > 0


WHOLE: dict[str, dict[str, object]] = {
    "a shape of words": {"shape": ["a", 2, 4, 8]},
    "a shape of fractions": {"shape": [1.5, 2, 4, 8]},
    "a shape below zero": {"shape": [-2, -2, 4, 8]},
    "a tenant that is a list": {"tenant": ["a"]},
    "a tenant that is an object": {"tenant": {"a": 1}},
    "a length below zero": {"length": "-7"},
    "half of a surrogate pair": {"header": "\ud800"},
}


@pytest.mark.parametrize("lie", WHOLE)
def test_a_header_that_was_forged_is_a_fault_and_keeps_no_tier_from_starting(
    lie: str, tmp_path: Path
) -> None:
    put(DiskTier(tmp_path, Ledger(1 << 20)), 1)
    (path,) = tmp_path.glob("*.segment")
    path.write_bytes(forged(path.read_bytes(), WHOLE[lie]))
    tier = DiskTier(tmp_path, Ledger(1 << 20))
    with pytest.raises(TierFault) as caught:
        read(tier, 1)
    assert caught.value.kind == "damaged"
    assert not path.exists()


def forged(file: bytes, lies: dict[str, object]) -> bytes:
    """A record's file that says something else, with a checksum that is right."""
    size = 8 + int.from_bytes(file[:8], "little")
    told = json.loads(file[8:size])
    about = told["__metadata__"]
    about["header"] = "0" * 8
    about |= {name: value for name, value in lies.items() if name != "shape"}
    for name, array in told.items():
        if name != "__metadata__" and "shape" in lies:
            array["shape"] = lies["shape"]
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sum_of = f'"header":"{zlib.crc32(text):08x}"'.encode()
    signed = text.replace(b'"header":"00000000"', sum_of, 1)
    return len(signed).to_bytes(8, "little") + signed + file[size:]
