"""``--reuse``: levels, what answers report of them, and tenants apart."""

from collections.abc import Iterator
from typing import Any

import pytest

from looseleaf.config import ServerConfig
from looseleaf.errors import InvalidOption
from tests.server.conftest import KEYS
from tests.server.live import DOCUMENT, Live, live_server

FILES = [
    "\n".join(f"{name} {n} keeps the number {n * 7 % 50} in drawer {n}." for n in range(30))
    for name in ("Mira", "Otto", "Lena")
]


@pytest.fixture(scope="module")
def discovering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The reference model with discovery, behind keys of two tenants."""
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_text("".join(f"{tenant} = {key}\n" for tenant, key in KEYS.items()))
    with live_server(config={"reuse": "discover", "api_keys": str(path)}) as server:
        yield server


def ask(live: Live, order: str, **fields: Any) -> Any:
    messages = [
        {"role": "system", "content": "Answer from the files."},
        *({"role": "user", "content": FILES[int(number)]} for number in order),
        {"role": "user", "content": "Which drawer is it?"},
    ]
    return live.chat(**{"key": KEYS["red"], "messages": messages, "max_tokens": 4, **fields})


def counts(response: Any) -> dict[str, Any]:
    reuse: dict[str, Any] = response.json()["looseleaf"]["reuse"]
    header = (
        f"exact={reuse['exact']}, out-of-context={reuse['out_of_context']}, "
        f"computed={reuse['computed']}"
    )
    assert response.headers["X-Looseleaf-Reuse"] == header
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == reuse["exact"] + reuse["out_of_context"] + reuse["computed"]
    return reuse


def test_moved_texts_are_found_by_their_contents_and_counted(discovering: Live) -> None:
    first = ask(discovering, "012", return_token_ids=True)
    second, third = ask(discovering, "120"), ask(discovering, "201", return_token_ids=True)
    assert counts(first)["discovered"] == 0
    total = third.json()["usage"]["prompt_tokens"]
    assert counts(second)["discovered"] > 0.7 * total
    assert counts(third)["out_of_context"] > 0.7 * total
    assert third.json()["looseleaf"]["documents"] == []
    exact = ask(discovering, "201", return_token_ids=True, looseleaf={"reuse": "exact"})
    ids = [r.json()["choices"][0]["prompt_token_ids"] for r in (third, exact)]
    assert ids[0] == ids[1]
    assert counts(exact)["discovered"] == 0 and counts(exact)["level"] == "exact"


def test_another_tenant_and_another_salt_find_nothing(discovering: Live) -> None:
    ask(discovering, "01")
    for fields in ({"key": KEYS["blue"]}, {"cache_salt": "own"}):
        tokens = counts(ask(discovering, "10", **fields))
        assert tokens["discovered"] == tokens["out_of_context"] == tokens["exact"] == 0


def test_a_request_may_ask_for_less_but_never_for_more(live: Live) -> None:
    fields = {"looseleaf": {"reuse": "discover"}, "documents": [{"text": DOCUMENT}]}
    assert counts(live.chat(**fields))["level"] == "documents"
    less = counts(live.chat(**{**fields, "looseleaf": {"reuse": "exact"}}))
    assert less["level"] == "exact" and less["out_of_context"] == 0
    assert live.chat(looseleaf={"reuse": "all"}).status_code == 400


def test_scored_prompts_and_ape_are_not_discovered(discovering: Live) -> None:
    ask(discovering, "02")
    assert counts(ask(discovering, "20", fuse="ape"))["discovered"] == 0
    assert counts(ask(discovering, "20", prompt_logprobs=0))["discovered"] == 0


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(InvalidOption, match="reuse"):
        ServerConfig(reuse="all")  # type: ignore[arg-type]
