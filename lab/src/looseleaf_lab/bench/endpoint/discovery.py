"""Facts about an endpoint before its load: model, tokens per word, and registered documents."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from looseleaf.errors import LooseleafError
from looseleaf_lab.bench.endpoint.client import Client
from looseleaf_lab.bench.endpoint.workload import Endpoint, Prompt, words

_PROBES = (64, 320)


async def find_model(endpoint: Endpoint, timeout: float) -> str:
    """The first id of ``/v1/models``. Raises LooseleafError if there is none."""
    models = await _json(endpoint, "GET", "/v1/models", None, timeout)
    models = models.get("data") if isinstance(models, dict) else None
    if not isinstance(models, list) or not models:
        raise LooseleafError(f"{endpoint.url} lists no models: give --model")
    return str(models[0]["id"])


async def has_documents(endpoint: Endpoint, timeout: float) -> bool:
    """Whether the server has Looseleaf's ``/v1/documents``. Raises LooseleafError if it fails."""
    client = Client(endpoint, time.monotonic, timeout)
    try:
        status, _ = await client.fetch("GET", "/v1/documents")
    except (OSError, EOFError, TimeoutError) as error:
        raise LooseleafError(f"{endpoint.url} does not answer: {error}") from error
    finally:
        client.close()
    return status == 200


async def register(endpoint: Endpoint, texts: Sequence[str], timeout: float) -> Endpoint:
    """The endpoint with an id for each text. Raises LooseleafError if one is refused."""
    ids = {}
    for number, text in enumerate(texts):
        body = {"id": f"bench-http-{os.getpid()}-{number}", "text": text}
        await _json(endpoint, "POST", "/v1/documents", body, timeout)
        ids[text] = body["id"]
    return replace(endpoint, ids=ids)


async def delete(endpoint: Endpoint, timeout: float) -> None:
    """Deletes the documents of `register`. Raises LooseleafError if one is refused."""
    for name in (endpoint.ids or {}).values():
        await _json(endpoint, "DELETE", f"/v1/documents/{name}", None, timeout)


async def words_per_token(endpoint: Endpoint, timeout: float) -> float:
    """Words of the generated texts per prompt token, by the usage of two short requests.

    1.0 without usage. Raises LooseleafError if a request fails: a load would fail, too."""
    client = Client(endpoint, time.monotonic, timeout)
    try:
        # two tokens, since some servers count a single one as no text
        prompts = [Prompt((), words("probe", count), 2) for count in _PROBES]
        answers = [await client.stream(prompt) for prompt in prompts]
    finally:
        client.close()
    for answer in answers:
        if answer.error and answer.error != "empty answer":
            raise LooseleafError(f"{endpoint.url}: a first request failed: {answer.error}")
    tokens = answers[1].prompt_tokens - answers[0].prompt_tokens
    return (_PROBES[1] - _PROBES[0]) / tokens if tokens > 0 else 1.0


async def _json(endpoint: Endpoint, method: str, path: str, body: Any, timeout: float) -> Any:
    client = Client(endpoint, time.monotonic, timeout)
    try:
        status, data = await client.fetch(method, path, body)
    except (OSError, EOFError, TimeoutError) as error:
        raise LooseleafError(f"{endpoint.url} does not answer: {error}") from error
    finally:
        client.close()
    if not 200 <= status < 300:
        text = data[:300].decode("utf-8", "replace")
        raise LooseleafError(f"{endpoint.url}{path}: status {status}: {text}")
    try:
        return json.loads(data or b"null")
    except ValueError as error:
        raise LooseleafError(f"{endpoint.url}{path} answers no JSON") from error
