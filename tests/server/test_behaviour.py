"""What an operator counts on: limits, deadlines, disconnects, faults, system prompts, metrics."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from looseleaf.engine.progress import RequestProgress
from looseleaf.engine.runner.runner import Runner
from looseleaf.server.names import REFERENCE_NAME
from tests.server.conftest import KEYS
from tests.server.live import DOCUMENT, QUESTION, Live, bearer, chat_body, live_server
from tests.server.metering import counted

LONG = {"max_tokens": 3000, "ignore_eos": True}


def error_of(response: httpx.Response) -> dict[str, Any]:
    return dict(response.json()["error"])


@dataclass
class Stream:
    """A stream under way; a reader that is forgotten would close it."""

    response: httpx.Response
    lines: Iterator[str]

    def close(self) -> None:
        """Go away."""
        self.response.close()


def open_stream(live: Live, key: str | None = None, **fields: Any) -> Stream:
    """A long stream whose first chunk has arrived."""
    body = chat_body(stream=True, **{**LONG, **fields})
    request = live.client.build_request(
        "POST", "/v1/chat/completions", json=body, headers=bearer(key)
    )
    response = live.client.send(request, stream=True)
    lines = response.iter_lines()
    assert next(lines).startswith("data: ")
    return Stream(response, lines)


def test_a_disconnect_frees_all_pages_within_a_step(live: Live) -> None:
    live.wait_until_idle()
    stream = open_stream(live)
    assert live.now().running == 1
    steps = live.now().counters
    stream.close()
    live.wait_until_idle()
    after = live.now().counters
    assert after.aborted == steps.aborted + 1
    assert after.output_tokens - steps.output_tokens < 500, "it went on after its caller had gone"


def test_a_disconnect_before_the_first_token_ends_the_work(live: Live) -> None:
    live.wait_until_idle()
    aborted = live.now().counters.aborted
    text = "".join(f"{DOCUMENT} {n}. " for n in range(100))
    body = chat_body(documents=[{"text": text}], max_tokens=500, ignore_eos=True)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=live.url, trust_env=False) as client:
            task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            while not live.service.queue.reserved and not task.done():
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    live.wait_until_idle()
    assert live.now().counters.aborted == aborted + 1


def test_a_deadline_ends_a_request_with_408(live: Live) -> None:
    refused = live.chat(deadline=0.01, **LONG)
    assert refused.status_code == 408
    assert error_of(refused)["code"] == "deadline_exceeded"
    live.wait_until_idle()


def test_a_client_of_openais_asks_once_in_the_time_that_it_gives(live: Live) -> None:
    openai = pytest.importorskip("openai")
    requests = live.now().counters.requests
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=2)
    with client, pytest.raises(openai.APIStatusError, match="deadline"):
        client.chat.completions.create(
            **chat_body(max_tokens=3000, extra_body={"deadline": 0.01, "ignore_eos": True})
        )
    live.wait_until_idle()
    assert live.now().counters.requests == requests + 1


def test_a_deadline_in_a_stream_is_its_last_event(live: Live) -> None:
    events = live.events("/v1/chat/completions", chat_body(stream=True, deadline=1.5, **LONG))
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert len(events) > 1
    live.wait_until_idle()


def test_too_many_tokens_are_refused_with_the_numbers(live: Live) -> None:
    refused = live.chat(max_tokens=4096)
    message = error_of(refused)["message"]
    assert refused.status_code == 400
    assert error_of(refused)["code"] == "context_length_exceeded"
    assert "4096" in message
    assert str(live.service.llm.engine.max_model_len) in message


def test_a_full_queue_is_told_with_a_time_to_retry() -> None:
    with live_server(config={"max_queue": 1}, engine={"max_num_seqs": 1}) as live:
        streams = [open_stream(live)]
        waiting = threading.Thread(target=lambda: streams.append(open_stream(live)))
        waiting.start()
        while live.service.queue.reserved < 2 and waiting.is_alive():
            pass
        refused = live.chat()
        assert refused.status_code == 429
        assert error_of(refused)["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        streams[0].close()
        waiting.join(30)
        streams[1].close()
        live.wait_until_idle()


def test_limits_are_counted_for_each_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("".join(f"{t}={k}\n" for t, k in KEYS.items()), encoding="utf-8")
    config = {"api_keys": str(path), "concurrent_requests": 1, "requests_per_minute": 3}
    with live_server(config=config) as live:
        stream = open_stream(live, KEYS["red"])
        second = live.chat(key=KEYS["red"])
        assert second.status_code == 429
        assert error_of(second)["code"] == "concurrency_limit_exceeded"
        assert live.chat(key=KEYS["blue"]).status_code == 200
        stream.close()
        live.wait_until_idle()
        codes = [live.chat(key=KEYS["blue"]).status_code for _ in range(4)]
        assert codes == [200, 200, 429, 429]
        refused = live.chat(key=KEYS["blue"])
        assert error_of(refused)["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 60


def test_a_fault_fails_its_request_with_an_id_and_the_server_stays_up(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, work: Any) -> Any:
        raise RuntimeError("a fault made by a test")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", fail)
        failed = live.chat(messages=[{"role": "user", "content": "A question of its own."}])
    assert failed.status_code == 500
    assert failed.headers["x-request-id"] in error_of(failed)["message"]
    assert "made by a test" not in failed.text
    assert live.chat().status_code == 200
    live.wait_until_idle()


def test_a_system_prompt_is_pinned_before_the_first_request_and_read_by_its_model_only(
    tmp_path: Path,
) -> None:
    path = tmp_path / "system.txt"
    path.write_text("Answer from the documents, in one sentence. " * 12, encoding="utf-8")
    with live_server(config={"system_prompt": (f"helper={path}",)}) as live:
        models = {m["id"]: m for m in live.client.get("/v1/models").json()["data"]}
        assert list(models) == [REFERENCE_NAME, "helper"]
        assert live.now().pages.pinned > 0
        length = models["helper"]["system_prompt_tokens"]
        assert length > 100
        plain, helped = (live.chat(model=name).json()["usage"] for name in models)
        assert helped["prompt_tokens"] > plain["prompt_tokens"]
        assert helped["prompt_tokens_details"]["cached_tokens"] >= length - 16
        assert plain["prompt_tokens_details"]["cached_tokens"] == 0
        live.wait_until_idle()


def test_documents_are_counted_once_at_admission(live: Live) -> None:
    before = counted(live)
    documents = [{"text": f"{DOCUMENT} Counted, page {n}."} for n in range(2)]
    for _ in range(2):
        live.chat(documents=documents)
    live.wait_until_idle()
    after = counted(live)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown('looseleaf_documents_total{source="computed"}') == 2
    assert grown('looseleaf_documents_total{source="cached"}') == 2
    assert grown('looseleaf_requests_total{end="finished"}') == 2
    assert grown("looseleaf_time_to_first_token_seconds_count") == 2
    pages = [v for name, v in after.items() if name.startswith("looseleaf_pages{")]
    assert sum(pages) == live.now().pages.total


def test_an_open_server_answers_to_names_of_this_machine_only(live: Live) -> None:
    refused = live.client.get("/v1/models", headers={"Host": "evil.example"})
    assert refused.status_code == 403
    port = live.server.bound_port
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", "[::1]"):
        assert live.client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_a_request_id_of_the_caller_is_in_every_answer(live: Live) -> None:
    for path in ("/v1/models", "/v1/nothing"):
        response = live.client.get(path, headers={"X-Request-Id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_load_balancer_may_ask_by_head(live: Live, path: str) -> None:
    answer = live.client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_template_places_titles_and_leaves_their_line_out_without_one() -> None:
    with live_server(config={"document_template": "Title: {title}\n{text}"}) as live:
        engine = live.service.llm.engine

        def shown(document: dict[str, str]) -> str:
            messages = [{"role": "user", "content": QUESTION}]
            body = {"messages": messages, "documents": [document]}
            return engine.tokenizer.decode(live.post("/tokenize", body).json()["tokens"])

        assert "Title: Book\nHere." in shown({"title": "Book", "text": "Here."})
        assert "Title" not in shown({"text": "Here."})


def test_nothing_of_a_request_is_kept_once_it_has_ended(live: Live) -> None:
    def kept() -> int:
        live.wait_until_idle()
        gc.collect()
        return sum(type(item) is RequestProgress for item in gc.get_objects())

    # an engine's thread may still have its last one at hand, that of another server, too
    before = kept()
    for n in range(20):
        live.chat(messages=[{"role": "user", "content": f"Who signs request {n}?"}], max_tokens=2)
    assert kept() <= before + 1
