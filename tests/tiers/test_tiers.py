"""What holds for every tier: records come back as they were, whole or not at all."""

import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from looseleaf.errors import InvalidOption
from looseleaf.tiers import (
    DiskTier,
    HostTier,
    Ledger,
    RemoteTier,
    Tier,
    TierCounters,
    TierFault,
)
from looseleaf.tiers.guard import Guard
from looseleaf.tiers.stores.arena import Arena
from looseleaf.tiers.transfer.loader import Loader
from looseleaf.tiers.transfer.pool_copy import PoolCopy
from tests.tiers.records import RECORD_BYTES, content, key, numbers, put, read, record
from tests.tiers.redis_server import RedisServer


def test_a_record_comes_back_layer_by_layer_as_it_was_stored(tier: Tier) -> None:
    for number in range(3):
        assert put(tier, number, tenant="red")
    assert tier.contains([key(n) for n in range(5)]) == [True] * 3 + [False] * 2
    for number in range(3):
        found = read(tier, number)
        assert found is not None and torch.equal(found, content(number))
    assert read(tier, 3) is None
    assert sorted(numbers(tier)) == [0, 1, 2]
    assert all(e.tenant == "red" and e.num_bytes >= RECORD_BYTES for e in tier.entries())


def test_what_is_there_is_not_stored_again(tier: Tier) -> None:
    assert put(tier, 1)
    assert not tier.put(record(1), content(2))
    found = read(tier, 1)
    assert found is not None and torch.equal(found, content(1))


def test_what_was_deleted_is_gone(tier: Tier) -> None:
    put(tier, 1)
    put(tier, 2)
    assert tier.delete([key(1), key(7)]) == 1
    assert tier.contains([key(1), key(2)]) == [False, True]
    assert read(tier, 1) is None
    assert tier.delete([]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_sidecars_come_back_by_name_with_dtype_and_shape(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    tier = DiskTier(tmp_path, Ledger(1 << 20))
    arrays = {
        "low": torch.arange(24).reshape(2, 3, 4).to(dtype),
        "none": torch.empty(0, 5, dtype=dtype),
        "one": torch.tensor(7).to(dtype),
    }
    assert not tier.put_sidecar(key(1), "page-bounds", arrays)
    put(tier, 1)
    assert tier.put_sidecar(key(1), "page-bounds", arrays)
    assert tier.put_sidecar(key(1), "index_2", {"rows": torch.ones(2)})
    found = tier.get_sidecar(key(1), "page-bounds")
    assert found is not None and list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == dtype and torch.equal(found[name], array)
    assert tier.put_sidecar(key(1), "page-bounds", {"low": torch.zeros(1)})
    assert list(tier.get_sidecar(key(1), "page-bounds") or ()) == ["low"]
    assert tier.get_sidecar(key(1), "other") is None
    tier.delete([key(1)])
    assert tier.get_sidecar(key(1), "page-bounds") is None


@pytest.mark.parametrize("name", ["", "a/b", "..", "a.b", "ä"])
def test_a_sidecar_that_is_no_word_is_refused(tmp_path: Path, name: str) -> None:
    tier = DiskTier(tmp_path, Ledger(1 << 20))
    put(tier, 1)
    with pytest.raises(ValueError, match="letters, digits"):
        tier.put_sidecar(key(1), name, {"x": torch.ones(1)})


def test_a_record_that_goes_while_it_is_read_is_read_to_its_end_or_is_a_fault(tier: Tier) -> None:
    put(tier, 1)
    reader = tier.open(key(1))
    assert reader is not None
    into = torch.empty(reader.record.layer_bytes, dtype=torch.uint8)
    assert torch.equal(reader.read(0, into), content(1)[0])
    tier.delete([key(1)])
    put(tier, 2)
    try:
        assert torch.equal(reader.read(1, into), content(1)[1])
    except TierFault as fault:
        assert fault.kind == "missing"
    reader.close()


def test_threads_that_store_read_and_delete_never_see_half_a_record(tier: Tier) -> None:
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        start.wait(10)
        for turn in range(40):
            number = (seed + turn) % 3
            if (turn + seed) % 5 == 0:
                tier.delete([key(number)])
            put(tier, number)
            try:
                found = read(tier, number)
            except TierFault as fault:
                assert fault.kind == "missing"
            else:
                assert found is None or torch.equal(found, content(number))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, seed) for seed in range(4)]:
            done.result(60)


def test_a_disk_remembers_after_a_restart_what_was_used_last(tmp_path: Path) -> None:
    now = [time.time()]
    first = DiskTier(tmp_path, Ledger(1 << 20), clock=lambda: now[0])
    for number in range(3):
        put(first, number, tenant="red")
    first.put_sidecar(key(0), "bounds", {"low": torch.ones(3)})
    for number in (1, 2, 0):
        now[0] += 10
        read(first, number)
    again = DiskTier(tmp_path, Ledger(1 << 20), clock=lambda: now[0])
    assert numbers(again) == [1, 2, 0]
    assert {e.tenant for e in again.entries()} == {"red"}
    found = read(again, 0)
    assert found is not None and torch.equal(found, content(0))
    assert torch.equal((again.get_sidecar(key(0), "bounds") or {})["low"], torch.ones(3))
    assert again.ledger.used == first.ledger.used
    # with less room, what was used last stays
    small = DiskTier(tmp_path, Ledger(2 * RECORD_BYTES))
    assert numbers(small) == [0]
    assert len(list(tmp_path.glob("*.segment"))) == 1


def test_two_processes_find_what_the_other_wrote(tmp_path: Path) -> None:
    mine, other = (DiskTier(tmp_path, Ledger(1 << 20)) for _ in range(2))
    put(mine, 1)
    assert other.contains([key(1)]) == [True]
    found = read(other, 1)
    assert found is not None and torch.equal(found, content(1))
    mine.delete([key(1)])
    assert other.contains([key(1)]) == [True], "it is told when it is opened"
    assert read(other, 1) is None
    assert other.contains([key(1)]) == [False]


def test_what_another_process_wrote_too_long_ago_is_written_anew(tmp_path: Path) -> None:
    now = 1000.0
    tier = DiskTier(tmp_path, Ledger(1 << 20, ttl=100.0, clock=lambda: now), clock=lambda: now)
    put(DiskTier(tmp_path, Ledger(1 << 20)), 1)
    for path in tmp_path.glob("*.segment"):
        os.utime(path, (now - 200, now - 200))
    assert put(tier, 1)
    assert numbers(tier) == [1] and tier.counters.stored == 1


def test_a_folder_that_is_emptied_is_filled_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    tier = DiskTier(folder, Ledger(1 << 20))
    assert put(tier, 1)
    shutil.rmtree(folder)
    assert tier.open(key(1)) is None
    assert put(tier, 1) and put(tier, 2)
    found = read(tier, 1)
    assert found is not None and torch.equal(found, content(1))


def test_a_file_that_goes_while_the_folder_is_read_is_no_fault(tmp_path: Path) -> None:
    put(DiskTier(tmp_path, Ledger(1 << 20)), 1)
    (tmp_path / f"{key(2).hex()}.segment").symlink_to(tmp_path / "gone")
    assert numbers(DiskTier(tmp_path, Ledger(1 << 20))) == [1]


def test_a_folder_is_listed_once_however_many_records_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = DiskTier(tmp_path, Ledger(1 << 20))
    for number in range(9):
        put(first, number)
        first.put_sidecar(key(number), "bounds", {"low": torch.ones(3)})
    listed = []
    for name in ("listdir", "scandir"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda p, c=call: listed.append(p) or c(p))
    tier = DiskTier(tmp_path, Ledger(1 << 20))
    assert tier.ledger.used == first.ledger.used
    assert tier.delete([key(number) for number in range(5)]) == 5
    # and that of what is unfinished
    assert len(listed) == 2
    monkeypatch.undo()
    assert len(list(tmp_path.glob("*.sidecar"))) == len(list(tmp_path.glob("*.segment"))) == 4


def test_any_safetensors_reader_opens_a_record(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tier = DiskTier(tmp_path, Ledger(1 << 20))
    put(tier, 5)
    (path,) = tmp_path.glob("*.segment")
    arrays = load_file(path)
    layers = content(5).view(torch.float32).view(3, 2, 2, 2, 4, 8)
    assert set(arrays) == {f"{letter}.{n}" for letter in "kv" for n in range(3)}
    for layer in range(3):
        for half, letter in enumerate("kv"):
            mine = arrays[f"{letter}.{layer}"].view(torch.int32)
            assert torch.equal(mine, layers[layer, half].view(torch.int32))


def test_a_packed_record_says_what_was_packed(tier: Tier, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    packed = replace(record(5), dtype="BF16", layer_bytes=392, packed=True)
    layers = torch.arange(3 * 392).view(3, 392).to(torch.uint8)
    assert tier.put(packed, layers)
    reader = tier.open(key(5))
    assert reader is not None and reader.record == packed
    into = torch.empty(392, dtype=torch.uint8)
    for layer in range(3):
        assert torch.equal(reader.read(layer, into), layers[layer])
    reader.close()
    for path in (tmp_path / "cache").glob("*.segment"):
        arrays = load_file(path)
        assert [f"packed.{n}" for n in range(3)] == sorted(arrays)
        assert torch.equal(torch.stack([arrays[name] for name in sorted(arrays)]), layers)


def test_a_record_that_was_packed_otherwise_does_not_fit_a_pool() -> None:
    from tests.tiers.test_pool_copy import pool

    copy = PoolCopy(pool(torch.bfloat16, head_dim=64), "on")
    guard = Guard(HostTier(Ledger(1 << 20)), TierCounters())
    loader = Loader(guard, copy, Arena(1 << 16, pinned=False), None, 5.0, lambda *_: None)
    wanted = copy.record(key(1), 30, 2)
    other = replace(wanted, layer_bytes=wanted.layer_bytes - 16)
    assert guard.tier.put(other, torch.zeros(3, other.layer_bytes, dtype=torch.uint8))
    (load,) = loader.begin([(wanted, [1, 2])])
    assert load.wait_for_end(30) and load.state == "failed"
    loader.close()
    assert guard.counters.faults == {"unfit": 1}


def test_host_memory_in_pieces_is_made_whole_by_eviction() -> None:
    tier = HostTier(Ledger(4 * RECORD_BYTES))
    for number in range(4):
        assert put(tier, number)
    tier.delete([key(0), key(2)])
    double = record(9)
    wide = type(double)(key(9), 7, 6, double.layer_shape, "F32", double.layer_bytes)
    # room for two, but not side by side; the name is remembered, so the next time it may
    assert tier.put(wide, torch.cat([content(9), content(9)])) or tier.put(
        wide, torch.cat([content(9), content(9)])
    )
    assert tier.contains([key(9)]) == [True]


def test_a_remote_record_lives_as_long_as_it_was_told(redis_server: RedisServer) -> None:
    import redis

    tier = RemoteTier(redis_server.url, ttl=1000.0)
    put(tier, 1)
    client = redis.Redis(port=redis_server.port)
    times = [client.ttl(name) for name in client.keys("looseleaf:*")]
    assert len(times) == 1 and all(990 <= left <= 1000 for left in times)
    tier.pin(key(1), True)
    assert client.ttl(f"looseleaf:1:segment:{key(1).hex()}") == -1
    client.close()
    tier.close()


def test_a_remote_record_without_a_header_is_written_anew(redis_server: RedisServer) -> None:
    import redis

    tier = RemoteTier(redis_server.url)
    put(tier, 1)
    redis.Redis.from_url(redis_server.url).hdel(f"looseleaf:1:segment:{key(1).hex()}", "header")
    assert not put(tier, 1)
    assert read(tier, 1) is None
    assert put(tier, 1)
    found = read(tier, 1)
    assert found is not None and torch.equal(found, content(1))
    tier.close()


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("http://somewhere", "write redis://"),
        ("redis://somewhere/0?bogus=1", "bogus.*write redis://"),
        ("redis://somewhere/0?decode_responses=True", "can't have decode_responses: leave it out"),
        ("redis://somewhere/0?db=1&socket_timeout=30", "socket_timeout: .*set tier_timeout"),
        ("redis://somewhere/0?retry_on_timeout=yes", "can't have retry_on_timeout"),
    ],
)
def test_a_url_that_can_not_be_read_is_refused_with_advice(url: str, advice: str) -> None:
    with pytest.raises(InvalidOption, match=advice):
        RemoteTier(url)


def test_a_url_may_say_how_to_reach_the_server() -> None:
    tier = RemoteTier("rediss://name:word@somewhere/3?ssl_cert_reqs=none&protocol=3", timeout=2.0)
    about = tier._redis.connection_pool.connection_kwargs
    assert (about["socket_timeout"], int(about["protocol"]), about["db"]) == (2.0, 3, 3)
    tier.close()


def test_a_tier_that_is_full_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(DiskTier(tmp_path, Ledger(1 << 20)), TierCounters())

    def fill(_: Tier) -> bool:
        raise TierFault("full", "disk: no space left on device")

    for _ in range(3):
        assert not guard.call(fill, False)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the disk tier is full") and "no space left" in said
    assert guard.counters.faults == {"full": 3} and not guard.breaker.is_open
