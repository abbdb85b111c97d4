"""An arm that asks any server with the OpenAI API, so that engines can be compared on one task.

Needs ``httpx`` (extra ``evals``)."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from looseleaf.errors import InvalidOption, install
from looseleaf_lab.errors import EndpointFailed
from looseleaf_lab.evals.task import Answer, Item

DocumentsAs = Literal["text", "parts"]
"""In the user's message as text, as any server takes them; or as content parts of the type
``document``, as Looseleaf's own server does."""


@dataclass(frozen=True)
class EndpointArm:
    """Greedy answers of the ``model`` behind ``url``, e.g. ``http://localhost:8000/v1``.

    ``concurrency`` questions are asked at a time, each with ``timeout`` seconds for its answer.
    Raises EndpointFailed if the server can't be reached or refuses."""

    url: str
    model: str
    key: str = ""
    documents_as: DocumentsAs = "text"
    concurrency: int = 8
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InvalidOption(f"an endpoint begins with http:// or https://, not {self.url!r}")

    @property
    def name(self) -> str:
        """How the documents are sent: what is behind the address is not known here."""
        return f"endpoint, documents as {self.documents_as}"

    def answer(self, items: Sequence[Item]) -> list[Answer]:
        """One answer for each item, several asked at a time. Raises InvalidOption for items of
        several turns, and without httpx."""
        try:
            import httpx
        except ImportError as error:
            raise InvalidOption(f"--endpoint needs httpx: {install('evals')}") from error

        if any(item.turns for item in items):
            raise InvalidOption(
                "an interview writes questions into the output, which only a model in this process "
                "can do: leave out --endpoint"
            )

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with (
            httpx.Client(headers=headers, timeout=self.timeout) as client,
            ThreadPoolExecutor(self.concurrency) as pool,
        ):
            return list(pool.map(lambda item: self._ask(client, item), items))

    def body(self, item: Item) -> dict[str, Any]:
        """The request for an item."""
        before = [item.before] if item.before else []
        content: Any = "\n\n".join([*before, *item.documents, item.question])
        if self.documents_as == "parts":
            texts = [{"type": "text", "text": text} for text in before]
            documents = [{"type": "document", "text": text} for text in item.documents]
            content = [*texts, *documents, {"type": "text", "text": item.question}]
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": item.max_tokens,
            "temperature": 0.0,
        }

    def _ask(self, client: Any, item: Item) -> Answer:
        import httpx

        address = f"{self.url.rstrip('/')}/chat/completions"
        try:
            response = client.post(address, json=self.body(item))
        except httpx.HTTPError as error:
            raise EndpointFailed(
                f"{address} did not answer ({type(error).__name__}: {error}): is the server up?"
            ) from error
        if response.status_code != 200:
            said = response.text[:300]
            raise EndpointFailed(f"{address} refused with {response.status_code}: {said}")
        try:
            text = response.json()["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EndpointFailed(f"{address} answered in another shape than OpenAI's") from error
        return Answer(text or "")
