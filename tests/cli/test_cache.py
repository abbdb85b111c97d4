"""``looseleaf cache`` lists, counts, deletes and verifies stored documents."""

from pathlib import Path

import pytest

from looseleaf.server.keys import Caller
from looseleaf.tiers import HOSTED, DiskTier, Ledger, RemoteTier, tenant_of
from looseleaf.tiers.stores import files
from tests.cli.conftest import Run
from tests.tiers.records import key, put
from tests.tiers.redis_server import RedisServer, redis_server, shared_redis

__all__ = ["redis_server", "shared_redis"]


@pytest.fixture(params=["disk", "remote"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The flags of a tier with three records, two of them red's."""
    tier: DiskTier | RemoteTier
    if request.param == "disk":
        tier = DiskTier(tmp_path, Ledger(1 << 20))
        flags = ["--disk-path", str(tmp_path)]
    else:
        url = request.getfixturevalue("redis_server").url
        tier = RemoteTier(url)
        flags = ["--remote-url", url]
    for number, tenant in ((1, ""), (2, "red"), (3, "red")):
        put(tier, number, tenant)
    tier.close()
    return flags


def test_ls_stat_rm_and_verify_agree(run: Run, where: list[str]) -> None:
    listed = run("cache", "ls", *where).out.splitlines()
    assert {line.split()[0] for line in listed} == {key(n).hex() for n in (1, 2, 3)}
    assert sum(" red " in line for line in listed) == 2
    said = run("cache", "stat", *where).out.splitlines()
    assert said[0].startswith("3 documents") and said[1].startswith("red: 2 documents")
    assert run("cache", "verify", *where).out == "3 checked, 0 damaged\n"
    assert run("cache", "rm", *where, key(1).hex()).out == "1 documents deleted\n"
    assert run("cache", "rm", *where, "--tenant", "red").out == "2 documents deleted\n"
    assert run("cache", "ls", *where).out == ""
    assert run("cache", "rm", *where, "--all").out == "0 documents deleted\n"


def shown(run: Run, where: list[str]) -> dict[str, str]:
    """Tenants as ls shows them, by key."""
    return {
        line.split()[0]: line.split()[3] for line in run("cache", "ls", *where).out.splitlines()
    }


@pytest.fixture
def salted(tmp_path: Path) -> list[str]:
    """The flags of a folder with a document without salt, one of the salt ``blue`` and two of a
    server's tenant ``red``."""
    tier = DiskTier(tmp_path, Ledger(1 << 20))
    for number, salt in enumerate(("", "blue", *2 * [Caller("red", "").salt])):
        put(tier, number, tenant_of(salt))
    return ["--disk-path", str(tmp_path)]


def test_every_tenant_is_deleted_by_the_name_that_ls_and_stat_show(
    run: Run, salted: list[str]
) -> None:
    names = set(shown(run, salted).values())
    assert len(names) == 3
    counted = [line.split(":")[0] for line in run("cache", "stat", *salted).out.splitlines()[1:]]
    assert sorted(counted) == sorted(names)
    for name in names:
        before = shown(run, salted)
        run("cache", "rm", *salted, "--tenant", name)
        assert shown(run, salted) == {key: of for key, of in before.items() if of != name}
    assert shown(run, salted) == {}


@pytest.mark.parametrize(("name", "gone"), [("blue", {1}), ("red", {2, 3}), ("tenant red", {2, 3})])
def test_a_salt_and_a_tenant_of_a_server_are_found_by_their_own_names(
    run: Run, salted: list[str], name: str, gone: set[int]
) -> None:
    assert name not in run("cache", "ls", *salted).out + run("cache", "stat", *salted).out
    assert run("cache", "rm", *salted, "--tenant", name).out == f"{len(gone)} documents deleted\n"
    assert shown(run, salted).keys() == {key(n).hex() for n in {0, 1, 2, 3} - gone}


def test_a_name_of_both_a_salt_and_a_tenant_deletes_neither(run: Run, salted: list[str]) -> None:
    put(DiskTier(Path(salted[1]), Ledger(1 << 20)), 4, tenant_of("red"))
    said = run("cache", "rm", *salted, "--tenant", "red").sentence()
    for salt in ("red", "tenant red"):
        assert tenant_of(salt) in said
    assert len(shown(run, salted)) == 5


def test_verify_names_what_is_damaged_and_deletes_it_if_told(run: Run, tmp_path: Path) -> None:
    put(DiskTier(tmp_path, Ledger(1 << 20)), 1)
    (path,) = tmp_path.glob("*.segment")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = run("cache", "verify", "--disk-path", tmp_path)
    assert result.code == 1
    assert result.out.splitlines()[0] == f"{path.name}: layer 2 is not what was stored"
    assert path.exists()
    assert run("cache", "verify", "--delete", "--disk-path", tmp_path).code == 1
    assert not path.exists()
    assert run("cache", "verify", "--disk-path", tmp_path).code == 0


def test_verify_keeps_what_it_can_not_read_and_passes_over_what_has_gone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, Ledger(1 << 20))
    for number in (1, 2, 3):
        put(tier, number)
    kept, going, other = sorted(tmp_path.glob("*.segment"))
    opened = files.open_quietly

    def unruly(path: Path) -> int:
        # an engine evicts the second while the first is looked at, which is another user's
        going.unlink(missing_ok=True)
        if path == kept:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path)

    monkeypatch.setattr(files, "open_quietly", unruly)
    result = run("cache", "verify", "--delete", "--disk-path", tmp_path)
    lines = result.out.splitlines()
    assert lines[0].startswith(f"{kept.name}: unreadable, ") and "Permission denied" in lines[0]
    assert lines[1:] == ["2 checked, 0 damaged, 1 unreadable"] and result.code == 1
    assert kept.exists() and other.exists()


def test_keys_of_others_at_a_server_are_passed_over(run: Run, redis_server: RedisServer) -> None:
    import redis

    tier = RemoteTier(redis_server.url)
    put(tier, 1)
    tier.close()
    client = redis.Redis(port=redis_server.port)
    client.set("looseleaf:1:segment:foo", "x")
    client.set(f"looseleaf:1:segment:{key(2).hex()}", "x")
    where = ["--remote-url", redis_server.url]
    assert len(run("cache", "ls", *where).out.splitlines()) == 2
    assert run("cache", "stat", *where).out.startswith("2 documents")
    assert run("cache", "verify", *where).out.endswith("2 checked, 1 damaged\n")
    assert run("cache", "verify", *where).out == "1 checked, 0 damaged\n"
    assert run("cache", "rm", *where, "--all").out == "1 documents deleted\n"
    assert client.keys("*") == [b"looseleaf:1:segment:foo"]
    client.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls"], "name one tier"),
        (["ls", "--disk-path", "/no/such/folder"], "there is no folder"),
        (["stat", "--remote-url", "redis://127.0.0.1:1"], "can't be used"),
        (["rm", "--disk-path", "."], "say what to delete"),
        (["rm", "--disk-path", ".", "0f"], "0 documents have a key"),
    ],
)
def test_what_can_not_be_done_is_one_sentence(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "0f" in arguments:
        DiskTier(tmp_path, Ledger(1 << 20))
    assert said in run("cache", *arguments).sentence()


@pytest.mark.parametrize("command", [["ls"], ["stat"], ["verify"], ["rm", "--all"]])
def test_a_folder_that_is_no_tiers_is_left_as_it_is(
    run: Run, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    said = run("cache", *command, "--disk-path", tmp_path).sentence()
    assert "is no folder of a disk tier" in said
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_hosted_documents_are_seen_and_deleted_with_the_others(run: Run, tmp_path: Path) -> None:
    where = ["--disk-path", tmp_path]
    put(DiskTier(tmp_path, Ledger(1 << 20)), 1)
    put(DiskTier(tmp_path / HOSTED, Ledger(1 << 20)), 2, "red")
    listed = run("cache", "ls", *where).out.splitlines()
    assert [line.split()[0] for line in listed] == [key(1).hex(), key(2).hex()]
    assert [line.endswith(" hosted") for line in listed] == [False, True]
    said = run("cache", "stat", *where).out.splitlines()
    assert said[0].startswith("2 documents") and said[1].startswith("of these hosted: 1 documents")
    (path,) = (tmp_path / HOSTED).glob("*.segment")
    path.write_bytes(path.read_bytes()[:-1])
    damaged = run("cache", "verify", *where)
    assert damaged.code == 1
    assert damaged.out.startswith(f"hosted/{path.name}: the file is not as long as it says")
    assert damaged.out.endswith("2 checked, 1 damaged\n")
    assert run("cache", "rm", *where, "--all").out == "2 documents deleted\n"
    assert run("cache", "ls", *where).out == "" and not path.exists()
