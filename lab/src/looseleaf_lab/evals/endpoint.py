"""An arm over any server with the OpenAI API, to compare engines on one task.

Needs ``httpx`` (extra ``evals``)."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from looseleaf.errors import InvalidOption
from looseleaf_lab.errors import INSTALL, EndpointFailed
from looseleaf_lab.evals.task import Answer, Item

DocumentsAs = Literal["text", "parts"]
"""Documents as text in the user's message, which any server accepts, or as content parts of the
type ``document``, for Looseleaf's own server."""


@dataclass(frozen=True)
class EndpointArm:
    """Greedy answers of ``model`` at ``url``, e.g. ``http://localhost:8000/v1``.

    ``concurrency`` requests run in parallel, each with a timeout of ``timeout`` seconds. Raises
    EndpointFailed if the server can't be reached or returns an error."""

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
        """The form of the documents; the server's engine is unknown."""
        return f"endpoint, documents as {self.documents_as}"

    def answer(self, items: Sequence[Item]) -> list[Answer]:
        """One answer per item. Raises InvalidOption for items of several turns, and without
        httpx."""
        try:
            import httpx
        except ImportError as error:
            raise InvalidOption(f"--endpoint needs httpx: {INSTALL}") from error

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
        """The JSON body of an item's request."""
        prefix = [item.before] if item.before else []
        content: Any = "\n\n".join([*prefix, *item.documents, item.question])
        if self.documents_as == "parts":
            texts = [{"type": "text", "text": text} for text in prefix]
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
                f"{address} did not answer ({type(error).__name__}: {error}): check that the "
                "server runs"
            ) from error
        if response.status_code != 200:
            message = response.text[:300]
            raise EndpointFailed(f"{address} refused with {response.status_code}: {message}")
        try:
            text = response.json()["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EndpointFailed(f"{address} answered in another shape than OpenAI's") from error
        return Answer(text or "")
