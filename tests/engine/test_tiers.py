"""Documents come back from their tiers: laws 6 and 7. An answer is the same wherever its documents
came from, and no tier's failure is a request's."""

import threading
from pathlib import Path
from typing import Any

import pytest

from looseleaf import LLM, Fuse
from looseleaf.errors import InvalidOption
from looseleaf.tiers import HOSTED
from tests.engine.harness import (
    Folder,
    assert_idle,
    assert_same_answers,
    document,
    drawn,
    words,
)
from tests.engine.harness import ask as ask_with
from tests.engine.tiered import (
    DOCUMENTS,
    PARAMS,
    forget_pool,
    give_no_layer_ahead,
    load_always,
    make_unruly,
    prompts,
    raise_fault,
    sources,
    tiered,
)
from tests.tiers.redis_server import RedisServer

WAYS = ["host", "disk", "host and disk", "remote"]


def ask(llm: LLM, asked: Any) -> Any:
    return ask_with(llm, asked, PARAMS)


@pytest.fixture
def plain(checkpoint: Folder) -> list[Any]:
    """The answers of an engine without tiers."""
    return ask(tiered(checkpoint()), prompts())


def options(way: str, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    if "host" in way:
        chosen["host_gib"] = 0.01
    if "disk" in way:
        chosen["disk_path"] = str(tmp_path / "cache")
    if way == "remote":
        chosen["remote_url"] = request.getfixturevalue("redis_server").url
    return chosen


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_the_same_wherever_the_documents_come_from(
    checkpoint: Folder, tmp_path: Path, plain: list[Any], way: str, request: pytest.FixtureRequest
) -> None:
    llm = tiered(checkpoint(), **options(way, tmp_path, request))
    load_always(llm)
    first = ask(llm, prompts())
    assert_same_answers(first, plain)
    forget_pool(llm)
    again = ask(llm, prompts())
    assert_same_answers(again, plain)
    found = {source for answer in again for source in sources(answer.output)}
    assert "loaded" in found and "computed" not in found
    name = way.split()[0]
    loaded = [d for a in again for d in a.output.reuse.documents if d.source == "loaded"]
    assert {d.tier for d in loaded} == {name} and len(loaded) == 4
    assert llm.engine.counters.documents_loaded == 4
    assert llm.engine.counters.document_tokens_loaded == sum(d.num_tokens for d in loaded)
    assert llm.engine.tiers is not None
    assert llm.engine.tiers.counters[name].loads == 4
    assert llm.engine.tiers.counters[name].faults == {}
    llm.close()


@pytest.mark.parametrize("way", ["disk", "remote"])
def test_a_new_engine_finds_what_one_before_it_computed(
    checkpoint: Folder, tmp_path: Path, plain: list[Any], way: str, request: pytest.FixtureRequest
) -> None:
    chosen = options(way, tmp_path, request)
    first = tiered(checkpoint(), **chosen)
    ask(first, prompts())
    first.close()
    second = tiered(checkpoint(), **chosen)
    load_always(second)
    again = ask(second, prompts())
    assert_same_answers(again, plain)
    assert "computed" not in {s for answer in again for s in sources(answer.output)}
    # one salt finds nothing of another
    (other,) = second.generate([prompts()[0]], PARAMS, salt="red")
    assert sources(other) == ["computed"]
    second.close()


def test_what_came_from_disk_is_in_the_memory_of_the_host_then(
    checkpoint: Folder, tmp_path: Path
) -> None:
    disk = tmp_path / "cache"
    first = tiered(checkpoint(), disk)
    ask(first, prompts(1))
    first.close()
    llm = tiered(checkpoint(), disk, host_gib=0.01)
    load_always(llm)
    tiers = []
    for _ in range(2):
        (answer,) = ask(llm, prompts(1))
        tiers.append(answer.output.reuse.documents[0].tier)
        forget_pool(llm)
    assert tiers == ["disk", "host"]
    llm.close()


def test_a_layer_is_computed_before_the_next_one_is_loaded(
    checkpoint: Folder, tmp_path: Path, plain: list[Any]
) -> None:
    """A step that waited for the whole document would wait for ever."""
    llm = tiered(checkpoint(), tmp_path, tier_timeout=20.0)
    load_always(llm)
    ask(llm, prompts(1))
    forget_pool(llm)
    give_no_layer_ahead(llm)
    again = ask(llm, prompts(1))
    assert sources(again[0].output) == ["loaded"]
    assert_same_answers(again, plain[:1])
    llm.close()


def test_a_document_that_has_come_stays_though_its_request_ends_with_one_token(
    checkpoint: Folder, tmp_path: Path
) -> None:
    """The step that follows it is the request's last."""
    llm = tiered(checkpoint(), tmp_path, tier_timeout=20.0)
    load_always(llm)
    ask(llm, prompts(1))
    forget_pool(llm)
    give_no_layer_ahead(llm)
    one = drawn(3, max_tokens=1)
    found = [sources(ask_with(llm, prompts(1), one)[0].output) for _ in range(2)]
    assert found == [["loaded"], ["cached"]]
    assert_idle(llm)
    llm.close()


def test_who_has_something_else_to_do_does_not_wait_for_a_tier(
    checkpoint: Folder, tmp_path: Path
) -> None:
    """An output goes on while another's document is arriving, and the document's reader follows."""
    from looseleaf.prompt.request import Request

    llm = tiered(checkpoint(), tmp_path, tier_timeout=20.0)
    load_always(llm)
    ask(llm, prompts(1))
    forget_pool(llm)
    go_on = threading.Event()
    make_unruly(llm, lambda call, layer: call != "read" or layer < 1 or not go_on.wait(15))
    engine = llm.engine
    from tests.engine.harness import drawn

    busy = engine.add(Request("busy", engine.prompts.from_parts([words(9, 9)]), drawn(1, 12)))
    engine.step()
    slow = engine.add(Request("slow", engine.prompts.from_parts(prompts(1)[0]), PARAMS))
    for _ in range(9):
        engine.step()
    assert len(busy.output().token_ids) == 10
    assert len(slow.output().token_ids) == 0
    go_on.set()
    while engine.has_work:
        engine.step()
        engine.check()
    assert sources(slow.output()) == ["loaded"]
    assert_idle(llm)
    llm.close()


@pytest.mark.parametrize("kind", ["damaged", "missing", "timeout", "unavailable"])
@pytest.mark.parametrize("when", ["contains", "open", "first layer", "last layer", "put"])
def test_a_tier_that_fails_at_any_point_costs_no_answer(
    checkpoint: Folder, tmp_path: Path, plain: list[Any], when: str, kind: str
) -> None:
    llm = tiered(checkpoint(), tmp_path)
    load_always(llm)
    last = llm.engine.runner.model.config.num_layers - 1
    at = {"first layer": ("read", 0), "last layer": ("read", last)}.get(when, (when, -1))

    def mood(call: str, layer: int) -> None:
        if (call, layer) == at:
            raise_fault(kind)

    if when == "put":
        make_unruly(llm, mood)
    assert_same_answers(ask(llm, prompts()), plain)
    forget_pool(llm)
    if when != "put":
        make_unruly(llm, mood)
    again = ask(llm, prompts())
    assert_same_answers(again, plain)
    assert "loaded" not in {s for answer in again for s in sources(answer.output)}
    assert llm.engine.tiers is not None
    faults = llm.engine.tiers.counters["disk"].faults
    assert set(faults) == {kind} and faults[kind] > 0
    assert_idle(llm)
    llm.close()


def test_a_bug_in_a_tier_costs_no_answer_either(
    checkpoint: Folder, tmp_path: Path, plain: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    llm = tiered(checkpoint(), tmp_path)
    load_always(llm)

    def mood(call: str, layer: int) -> None:
        raise ZeroDivisionError(call)

    make_unruly(llm, mood)
    for _ in range(2):
        assert_same_answers(ask(llm, prompts()), plain)
        forget_pool(llm)
    assert "ZeroDivisionError" in caplog.text
    llm.close()


@pytest.mark.parametrize("when", ["contains", "open", "read"])
def test_a_tier_that_hangs_is_given_up_and_left_alone(
    checkpoint: Folder, tmp_path: Path, plain: list[Any], when: str
) -> None:
    llm = tiered(checkpoint(), tmp_path, tier_timeout=0.05)
    load_always(llm)
    ask(llm, prompts())
    forget_pool(llm)
    for_ever = threading.Event()

    def mood(call: str, layer: int) -> None:
        if call == when:
            for_ever.wait(20)

    make_unruly(llm, mood)
    assert_same_answers(ask(llm, prompts()), plain)
    assert llm.engine.tiers is not None
    counters = llm.engine.tiers.counters["disk"]
    assert counters.faults["timeout"] == (1 if when == "contains" else 4)
    # nobody asks any more, and nobody waits
    llm.engine.store.evict_idle()
    assert_same_answers(ask(llm, prompts()), plain)
    assert counters.faults["timeout"] <= 4 and counters.skipped > 0
    for_ever.set()
    llm.close()


def test_a_request_that_leaves_while_its_document_arrives_leaves_no_page_behind(
    checkpoint: Folder, tmp_path: Path, plain: list[Any]
) -> None:
    from looseleaf.prompt.request import Request

    llm = tiered(checkpoint(), tmp_path, tier_timeout=20.0)
    load_always(llm)
    ask(llm, prompts())
    forget_pool(llm)
    go_on, reading = threading.Event(), threading.Event()

    def mood(call: str, layer: int) -> None:
        if call == "read" and layer == 1:
            reading.set()
            go_on.wait(15)

    make_unruly(llm, mood)
    engine = llm.engine
    engine.add(Request("leaves", engine.prompts.from_parts(prompts()[2]), PARAMS))
    busy = engine.add(Request("busy", engine.prompts.from_parts([words(8, 9)]), PARAMS))
    engine.step()
    assert reading.wait(15)
    engine.abort("leaves")
    engine.check()
    assert engine.store.find(busy.outputs[0].sequence.keys.root) is None
    # its pages are used for something else at once, and nothing comes to them late
    others = ask(llm, [[words(70, 240)]])
    go_on.set()
    assert_same_answers(ask(llm, prompts()), plain)
    assert_same_answers(ask(llm, [[words(70, 240)]]), others)
    llm.close()


@pytest.mark.parametrize("fuse", [Fuse("all"), Fuse("first", tokens=3), Fuse("links", ratio=0.3)])
def test_blending_over_loaded_documents_is_blending_over_computed_ones(
    checkpoint: Folder, tmp_path: Path, fuse: Fuse
) -> None:
    prompt = prompts()[2]
    plain = tiered(checkpoint())
    (right,) = plain.generate([prompt], PARAMS, fuse=fuse)
    llm = tiered(checkpoint(), tmp_path)
    load_always(llm)
    llm.generate([prompt], PARAMS, fuse=fuse)
    forget_pool(llm)
    (output,) = llm.generate([prompt], PARAMS, fuse=fuse)
    assert output.token_ids == right.token_ids
    assert sources(output) == ["loaded"] * 3
    assert [d.recomputed for d in output.reuse.documents] == [
        d.recomputed for d in right.reuse.documents
    ]
    assert_idle(llm)
    llm.close()


def test_a_registered_document_comes_from_its_tier_and_goes_with_it(
    checkpoint: Folder, tmp_path: Path
) -> None:
    first = tiered(checkpoint(), tmp_path)
    first.register(DOCUMENTS[3], document_id="d")
    first.close()
    second = tiered(checkpoint(), tmp_path)
    load_always(second)
    info = second.register(DOCUMENTS[3], document_id="d", pinned=True)
    assert info.state == "ready" and second.engine.counters.prompt_tokens < info.num_tokens
    assert second.engine.tiers is not None
    assert second.engine.tiers.counters["disk"].loads == 1
    second.engine.documents.delete("d")
    second.close()
    assert list(tmp_path.glob("*.segment")) == []


def test_a_pool_in_which_nothing_else_fits_still_writes_and_loads(
    checkpoint: Folder, tmp_path: Path
) -> None:
    big = [document(9, 200), words(3, 5)]
    llm = tiered(checkpoint(), tmp_path, num_pages=16)
    load_always(llm)
    other = [document(8, 190), words(3, 5)]
    first = [ask(llm, [p]) for p in (big, other)]
    assert llm.engine.tiers is not None
    llm.engine.tiers.flush(30)
    again = [ask(llm, [p]) for p in (big, other, big)]
    for mine, right in zip(again, [*first, first[0]], strict=True):
        assert_same_answers(mine, right)
        assert sources(mine[0].output) == ["loaded"]
    llm.close()


def test_a_document_that_is_quicker_to_compute_is_not_loaded(
    checkpoint: Folder, tmp_path: Path
) -> None:
    llm = tiered(checkpoint(), tmp_path)
    ask(llm, prompts(1))
    forget_pool(llm)
    tiering = llm.engine.tiering
    assert tiering.controller is not None and llm.engine.tiers is not None
    for seconds, source in ((10.0, "computed"), (1e-6, "loaded")):
        for _ in range(100):
            llm.engine.tiers.speeds["disk"].observe(1000, seconds)
        (answer,) = ask(llm, prompts(1))
        assert sources(answer.output) == [source]
        forget_pool(llm)
    llm.close()


def test_a_folder_that_can_not_be_used_is_refused_with_advice(
    checkpoint: Folder, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidOption, match="choose a folder"):
        tiered(checkpoint(), tmp_path / "file")


def test_a_server_that_is_not_there_is_no_error(checkpoint: Folder, plain: list[Any]) -> None:
    free = RedisServer.on_a_free_port()
    llm = tiered(checkpoint(), remote_url=free.url)
    assert_same_answers(ask(llm, prompts()), plain)
    assert llm.engine.tiers is not None
    assert llm.engine.tiers.counters["remote"].faults["unavailable"] > 0
    llm.close()


def test_a_folder_in_the_users_home_holds_hosted_documents_too(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    llm = tiered(checkpoint(), Path("~/kept"))
    assert llm.engine.hosting.folder == tmp_path / "home" / "kept" / HOSTED / "indexing"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    llm.close()
