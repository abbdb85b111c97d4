"""Registered documents outlive the process where there is a disk tier."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from looseleaf.server.records import FOLDER, Record, Records
from tests.server.conftest import KEYS
from tests.server.live import Live, bearer, live_server

TEXT = "Mira Tolland signs travel requests. The archive is in the north wing. "


@contextmanager
def started(folder: Path, **config: Any) -> Iterator[Live]:
    """A server with a disk tier that has registered again what there was."""
    engine = {"disk_path": str(folder / "disk"), "disk_gib": 0.1}
    with live_server(config={"log_level": "info", **config}, engine=engine) as live:
        while live.service.records.coming:
            live.client.get("/health")
        live.wait_until_idle()
        yield live


def register(live: Live, text: str | list[str] = TEXT, key: str | None = None, **more: Any) -> str:
    answer = live.post("/v1/documents", {"text": text, **more}, headers=bearer(key))
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def documents(live: Live, key: str | None = None) -> dict[str, Any]:
    found = live.client.get("/v1/documents", headers=bearer(key)).json()["data"]
    return {one["id"]: one for one in found}


def records(folder: Path) -> list[Path]:
    return sorted((folder / "disk" / FOLDER).glob("*/*"))


def test_documents_are_registered_again_as_they_were(tmp_path: Path) -> None:
    with started(tmp_path) as live:
        names = [
            register(live, title="handbook.txt", id="handbook", pinned=True),
            register(live, [TEXT, "The key is blue."], title="both"),
            register(live, TEXT * 20, id="long", hosted=True, index="flat"),
        ]
        before = documents(live)
    with started(tmp_path) as live:
        after = documents(live)
        assert list(after) == list(before) == names
        same = ("title", "tokens", "tokens_done", "pages", "pinned", "hosted", "state")
        for name in names:
            assert [after[name][one] for one in same] == [before[name][one] for one in same]
        # its keys and values were on the disk
        assert after["handbook"]["computed"] == 0
        assert live.now().pages.pinned == after["handbook"]["pages"] > 0
        answer = live.chat(documents=[{"id": "handbook"}])
        (document,) = answer.json()["looseleaf"]["documents"]
        assert (document["title"], document["source"]) == ("handbook.txt", "cached")


def test_what_was_deleted_or_unpinned_stays_so(tmp_path: Path) -> None:
    with started(tmp_path) as live:
        register(live, "The first is red.", id="first", pinned=True)
        register(live, "The second is blue.", id="second", pinned=True)
        assert live.client.delete("/v1/documents/first").status_code == 200
        assert live.client.delete("/v1/documents/second/pin").json()["pinned"] is False
    assert len(records(tmp_path)) == 1
    with started(tmp_path) as live:
        assert live.client.get("/v1/documents/first").status_code == 404
        assert documents(live)["second"]["pinned"] is False
        assert live.post("/v1/documents/second/pin", {}).json()["pinned"] is True
    with started(tmp_path) as live:
        assert documents(live)["second"]["pinned"] is True


def test_a_document_of_two_models_is_computed_for_both(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("You answer in one word.", "utf-8")
    served = {"system_prompt": (f"brief={prompt}",)}
    with started(tmp_path, **served) as live:
        register(live, id="shared")
        one = documents(live)["shared"]["pages"]
        register(live, id="shared", model="brief")
        assert documents(live)["shared"]["pages"] == 2 * one
    with started(tmp_path, **served) as live:
        assert documents(live)["shared"]["pages"] == 2 * one
    # of a model that is served no more nothing is computed
    with started(tmp_path) as live:
        assert documents(live)["shared"]["pages"] == one


def test_tenants_find_their_own_documents_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{t}={k}\n" for t, k in KEYS.items()), "utf-8")
    with started(tmp_path, api_keys=str(keys)) as live:
        for tenant in ("red", "blue"):
            register(live, f"The house of {tenant}.", KEYS[tenant], id="house")
    keys.write_text(f"red={KEYS['red']}\n", "utf-8")
    with started(tmp_path, api_keys=str(keys)) as live:
        assert list(documents(live, KEYS["red"])) == ["house"]
        assert live.now().registered_documents == 1
    told = capsys.readouterr().err
    assert "tenant 'blue' has no key here" in told
    # the server started, and said that others can read the file
    assert ('"keys_exposed"' in told) == bool(keys.stat().st_mode & 0o066)
    assert len(records(tmp_path)) == 2


def test_damaged_records_are_told_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with started(tmp_path) as live:
        for n in range(4):
            register(live, f"Page {n}. {TEXT}", id=f"page-{n}")
    cut, wrong, moved, whole = records(tmp_path)
    kept = json.loads(whole.read_bytes())["id"]
    cut.write_bytes(cut.read_bytes()[:40])
    content = json.loads(wrong.read_bytes())
    wrong.write_text(json.dumps({**content, "pinned": [TEXT]}), "utf-8")
    moved.rename(moved.with_name(f"{'0' * 32}.json"))
    (whole.parent / "folder.json").mkdir()
    (whole.parent / "unfinished.tmp").write_bytes(b"{")
    capsys.readouterr()
    with started(tmp_path) as live:
        assert list(documents(live)) == [kept]
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    told = [line for line in lines if line["event"] == "registration_left_out"]
    assert len(told) == 4
    assert {cut.name, wrong.name} < {line["file"] for line in told}
    assert "Mira" not in json.dumps(told)
    assert cut.exists() and wrong.exists()


def test_servers_on_one_folder_leave_each_other_alone(tmp_path: Path) -> None:
    with started(tmp_path) as one, started(tmp_path) as two:
        register(one, "The same text.", id="same")
        register(two, "The same text.", id="same", pinned=True)
        register(one, "Of one.", id="one")
        register(two, "Of two.", id="two")
        assert one.client.delete("/v1/documents/same").status_code == 200
        # the other still has it, and its record is gone: to unpin it brings none back
        assert two.client.delete("/v1/documents/same/pin").status_code == 200
    with started(tmp_path, served_model_name="other") as live:
        assert documents(live) == {}
    with started(tmp_path) as live:
        assert list(documents(live)) == ["one", "two"]


def test_a_document_that_is_coming_is_told_as_that(tmp_path: Path) -> None:
    with started(tmp_path) as live:
        register(live, id="there")
        live.service.records.coming[records(tmp_path)[0].name] = None
        assert live.client.get("/v1/documents/there").status_code == 200
        live.call(lambda engine: engine.documents.delete("there"))
        paths = ("/v1/documents/there", "/v1/documents/there/pin")
        refused = [
            live.chat(documents=[{"id": "there"}]),
            *(live.client.get(paths[0]), live.client.delete(paths[0])),
            *(live.client.post(paths[1]), live.client.delete(paths[1])),
        ]
        for answer in refused:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "document_coming"
            assert answer.headers["retry-after"]
        assert live.client.get("/v1/documents/elsewhere").status_code == 404
        live.service.records.coming.clear()
        assert live.client.get("/v1/documents/there").status_code == 404


@pytest.fixture(params=["full", "a file where the folder should be"])
def unwilling(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A disk tier's folder that takes no records."""
    if request.param == "full":
        write = os.write

        def full(file: int, content: bytes) -> int:
            if str(tmp_path) in os.readlink(f"/proc/self/fd/{file}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(file, content)

        def no_sync(file: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", full)
        monkeypatch.setattr(os, "fsync", no_sync)
    else:
        (tmp_path / "disk").mkdir()
        (tmp_path / "disk" / FOLDER).write_text("no folder", "utf-8")
    return tmp_path


def counted(live: Live, name: str) -> float:
    lines = live.client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def test_what_can_not_be_written_down_is_refused_and_not_registered(
    unwilling: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with started(unwilling) as live:
        for more in ({}, {"stream": True}, {"wait": False}, {"hosted": True}):
            answer = live.post("/v1/documents", {"text": TEXT, "id": "a", **more})
            assert answer.status_code == 507, answer.text
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "not_kept")
            assert "require_kept" in error["message"] and str(unwilling) not in error["message"]
            assert answer.headers["x-should-retry"] == "false"
            assert documents(live) == {} and live.now().registered_documents == 0
        assert counted(live, "looseleaf_not_kept_total") == 4
        assert live.client.get("/ready").status_code == 200
        assert live.chat(documents=[{"text": TEXT}]).status_code == 200
    assert '"registration_not_kept"' in capsys.readouterr().err
    assert not any(path.suffix == ".json" for path in records(unwilling))


def test_a_document_that_need_not_be_kept_says_that_it_is_not(
    unwilling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(unwilling) as live:
        answer = live.post("/v1/documents", {"text": TEXT, "id": "a", "require_kept": False})
        assert answer.status_code == 201
        assert (answer.json()["state"], answer.json()["kept"]) == ("ready", False)
        assert documents(live)["a"]["kept"] is False
        # to ask for more does not take away what is there
        assert live.post("/v1/documents", {"text": TEXT, "id": "a"}).status_code == 507
        assert documents(live)["a"]["kept"] is False
        monkeypatch.undo()
        if (unwilling / "disk" / FOLDER).is_file():
            (unwilling / "disk" / FOLDER).unlink()
        again = live.post("/v1/documents", {"text": TEXT, "id": "a"})
        assert (again.status_code, again.json()["kept"]) == (201, True)
        assert documents(live)["a"]["kept"] is True
    with started(unwilling) as live:
        assert documents(live)["a"]["kept"] is True


def test_a_pin_and_a_deletion_that_a_restart_undoes_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path) as live:
        register(live, id="a")
        with monkeypatch.context() as patch:

            def broken(*_: object, **__: object) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr("looseleaf.server.records.os.replace", broken)
            patch.setattr(Records, "remove", broken)
            told = live.post("/v1/documents/a/pin", {})
            assert (told.status_code, told.json()["error"]["code"]) == (507, "not_kept")
            gone = live.client.delete("/v1/documents/a")
            assert (gone.status_code, gone.json()["error"]["code"]) == (507, "not_kept")
            assert documents(live) == {}
        # to delete it again goes on where that failed
        assert live.client.delete("/v1/documents/a").status_code == 200
        assert live.client.delete("/v1/documents/a").status_code == 404
    assert records(tmp_path) == []


@pytest.mark.parametrize("hosted", [False, True])
def test_a_ready_document_says_whether_its_keys_and_values_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosted: bool
) -> None:
    more = {"hosted": True, "index": "flat"} if hosted else {}
    with started(tmp_path) as live:
        whole = live.post("/v1/documents", {"text": TEXT, "id": "whole", **more}).json()
        assert (whole["kept"], whole["stored"]) == (True, True)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            # room for a small file, and for no more
            patch.setattr("looseleaf.tiers.stores.disk.write_all", full)
            told = live.post("/v1/documents", {"text": TEXT * 2, "id": "cut", **more})
            assert told.status_code == 201
            assert (told.json()["kept"], told.json()["stored"]) == (True, False)
        assert documents(live)["cut"]["stored"] is False
        assert counted(live, "looseleaf_not_kept_total") == 1
        events = live.events("/v1/documents", {"text": TEXT * 3, "stream": True, **more})
        assert events[-1]["stored"] is True
    with started(tmp_path) as live:
        found = documents(live)
        assert {name: found[name]["kept"] for name in ("whole", "cut")} == {
            "whole": True,
            "cut": True,
        }


def test_records_that_the_system_refuses_are_told_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with started(tmp_path) as live:
        register(live, id="whole")
    (whole,) = records(tmp_path)
    names = {name: whole.with_name(f"{n:032d}.json") for n, name in enumerate("lnpf")}
    names["l"].symlink_to(names["l"].name)
    names["n"].symlink_to("nowhere")
    os.mkfifo(names["p"])
    names["f"].mkdir()
    capsys.readouterr()
    with started(tmp_path) as live:
        assert list(documents(live)) == ["whole"]
        assert "looseleaf_registrations_left_out_total 4.0" in live.client.get("/metrics").text
    told = capsys.readouterr().err
    assert all(path.name in told for path in names.values())


def test_a_folder_of_records_that_can_not_be_listed_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / FOLDER).symlink_to(FOLDER)
    with started(tmp_path) as live:
        assert live.client.get("/ready").status_code == 200
        assert live.chat(documents=[{"text": TEXT}]).status_code == 200
    assert '"registrations_left_out"' in capsys.readouterr().err


def test_without_a_disk_tier_nothing_is_written_down(live: Live) -> None:
    assert live.service.records.folder is None
    name = register(live, "Of this process only.")
    assert live.client.delete(f"/v1/documents/{name}").status_code == 200


def test_a_write_that_fails_leaves_the_record_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Records(str(tmp_path), "m")
    registration = {"model": "m", "system": None, "hosted": False, "index": "auto"}
    fields = {"tenant": "", "title": None, "pinned": False, "registrations": [registration]}
    record = Record.model_validate({"id": "a", "text": "x", **fields})
    kept.write(record)

    def fail(file: int) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr("os.fsync", fail)
        kept.write(record.model_copy(update={"text": "y"}))
    assert kept.folder is not None
    (path,) = kept.folder.iterdir()
    assert kept.read(path.name) == record
