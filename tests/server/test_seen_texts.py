"""Texts that were seen keep their document, within one salt and a bound of bytes."""

import pytest

from looseleaf.prompt.request import Document
from looseleaf.server.seen_texts import Key, SeenTexts


def key(salt: str, text: str = "a text", title: str | None = None) -> Key:
    return (salt, title, "lead", text)


def document(seen: SeenTexts, wanted: Key) -> Document:
    return seen.document(wanted, lambda: Document(str(wanted[3]), wanted[1]))


def test_equal_texts_of_one_salt_are_one_document() -> None:
    hits: list[int] = []
    seen = SeenTexts(on_hit=lambda: hits.append(1))
    first = document(seen, key("one"))
    assert document(seen, key("one")) is first
    others = [
        key("two"),
        key("one", "another"),
        key("one", title="T"),
        ("one", None, "alone", "a text"),
    ]
    assert all(document(seen, other) is not first for other in others)
    assert len(hits) == 1


def test_the_oldest_texts_leave_when_the_bytes_are_used() -> None:
    seen = SeenTexts(num_bytes=60_000)
    kept = [document(seen, key("s", letter * 1000)) for letter in "abcdefgh"]
    assert document(seen, key("s", "h" * 1000)) is kept[-1]
    assert document(seen, key("s", "a" * 1000)) is not kept[0]


def test_titles_of_short_texts_count() -> None:
    seen, title = SeenTexts(num_bytes=60_000), "T" * 1000
    first = document(seen, key("s", "a", title=title))
    for number in range(30):
        document(seen, key("s", "a", title=f"{title}{number}"))
    assert document(seen, key("s", "a", title=title)) is not first


def test_a_text_that_is_refused_is_not_kept() -> None:
    seen = SeenTexts()

    def refuse() -> Document:
        raise ValueError("empty")

    with pytest.raises(ValueError):
        seen.document(key("s"), refuse)
    assert document(seen, key("s")).text == "a text"
