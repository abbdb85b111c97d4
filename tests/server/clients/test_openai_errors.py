"""The official client knows every refusal by its own class, and its retries meet a server that
says when to come back."""

import openai
import pytest

from looseleaf.engine.runner.runner import Runner
from tests.server.clients.asking import ANSWERS, with_documents
from tests.server.clients.conftest import client_of
from tests.server.running import RunningServer, running_server

QUESTION = "Where is the archive?"
MESSAGES = [{"role": "user", "content": QUESTION}]


def ask(client, **options):
    asked = {"model": "looseleaf-reference", "messages": MESSAGES, "temperature": 0, **options}
    return client.chat.completions.create(**asked)


@pytest.mark.parametrize(
    ("options", "error", "code", "word"),
    [
        ({"extra_body": {"fuse": "everything"}}, openai.BadRequestError, "invalid_value", "fuse"),
        ({"temperature": -1}, openai.BadRequestError, "invalid_value", "temperature"),
        ({"max_completion_tokens": 0}, openai.BadRequestError, "invalid_value", "max_completion"),
        ({"model": "gpt-4o"}, openai.NotFoundError, "model_not_found", "gpt-4o"),
        (
            {"messages": [{"role": "user", "content": "word " * 9_000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "4096",
        ),
        (
            {"extra_body": {"documents": [{"id": "nobody-knows"}]}},
            openai.NotFoundError,
            "document_not_found",
            "nobody-knows",
        ),
        (
            {"extra_body": {"deadline": 1e-6}},
            openai.APIStatusError,
            "deadline_exceeded",
            "deadline",
        ),
    ],
)
def test_a_refusal_is_the_clients_own_exception_and_names_its_reason(
    client, options, error, code, word
):
    with pytest.raises(error) as caught:
        ask(client, **options)
    assert caught.value.code == code
    assert word in caught.value.message
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    assert caught.value.request_id


def test_a_stream_that_is_refused_is_refused_before_it_begins(client):
    with pytest.raises(openai.BadRequestError):
        ask(client, stream=True, messages=[{"role": "user", "content": "word " * 9_000}])


def test_a_used_id_is_a_conflict(client):
    def register(text):
        body = {"id": "conflict", "text": text}
        return client.post("/documents", cast_to=object, body=body)

    assert register("The archive is in the north wing.")["state"] == "ready"
    assert register("The archive is in the north wing.")["state"] == "ready"
    with pytest.raises(openai.ConflictError):
        register("The archive is in the south wing.")


def test_no_key_or_a_wrong_one_is_an_authentication_error():
    with running_server(keys={"team": "a-secret-key"}) as server:
        for key in ("none", "a-secret-keys"):
            with (
                client_of(RunningServer(server.url, key)) as client,
                pytest.raises(openai.AuthenticationError) as caught,
            ):
                ask(client)
            assert caught.value.code == "invalid_api_key"
        with client_of(server) as client:
            assert ask(client).choices


def test_an_answer_that_takes_too_long_is_the_clients_timeout(server):
    with client_of(server, timeout=0.05) as client, pytest.raises(openai.APITimeoutError):
        ask(client, max_completion_tokens=3_000, extra_body={"ignore_eos": True})


def statuses(client, on=lambda status: None):
    """The statuses of all responses that the client gets from now on; ``on`` hears of each."""
    seen = []

    def hear(response):
        seen.append(response.status_code)
        on(response.status_code)

    client._client.event_hooks["response"].append(hear)
    return seen


def test_the_client_comes_back_after_a_429_when_it_was_told_to():
    with running_server("--concurrent-requests", "1") as server, client_of(server) as busy:
        stream = ask(busy, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        with client_of(server) as hasty, pytest.raises(openai.RateLimitError) as caught:
            ask(hasty)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        with client_of(server, max_retries=3) as patient:
            # the first refusal makes room: what the client waits for then is only the header
            seen = statuses(patient, lambda status: status == 429 and stream.close())
            answer = ask(patient)
        assert seen[0] == 429
        assert seen[-1] == 200
        assert answer.choices[0].message.content


def test_the_client_repeats_what_failed_by_a_fault_of_the_server(live, monkeypatch):
    run, left = Runner.run, [1]

    def fail_once(self, *arguments):
        if left:
            left.pop()
            raise RuntimeError("a fault made by a test")
        return run(self, *arguments)

    monkeypatch.setattr(Runner, "run", fail_once)
    with client_of(RunningServer(f"{live.url}/"), max_retries=1) as client:
        seen = statuses(client)
        options = with_documents(client, QUESTION)
        answer = client.chat.completions.create(temperature=0, **options)
    assert seen[-2:] == [500, 200]
    assert answer.choices[0].message.content.strip() == ANSWERS[QUESTION]


def test_a_fault_is_an_internal_server_error_with_the_requests_id(live, monkeypatch):
    def fail(self, *arguments):
        raise RuntimeError("a fault made by a test")

    with client_of(RunningServer(f"{live.url}/")) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "run", fail)
            with pytest.raises(openai.InternalServerError) as caught:
                ask(client, messages=[{"role": "user", "content": "A question of its own."}])
        assert caught.value.request_id in caught.value.message
        assert ask(client).choices
