"""Tags of documents pass between processes, and the summary is bounded."""

from types import SimpleNamespace

from looseleaf.engine.documents.holdings import Holdings
from looseleaf.llm.remote.wire import DocumentCache, parts_from_wire, parts_to_wire
from looseleaf.prompt.request import DocumentPart


class Store:
    """Every segment is in the pool."""

    pool = SimpleNamespace(num_pages=4)
    num_available = 3

    def find(self, key):
        return SimpleNamespace(ready=key != b"unready")


def request(*tags, key=b"key"):
    uses = [SimpleNamespace(part=DocumentPart((1, 2), 0, "", tag=tag), key=key) for tag in tags]
    return SimpleNamespace(documents=uses)


def test_the_latest_documents_are_kept():
    holdings = Holdings(Store(), lambda: [("a", b"key", 9)], most=2)
    holdings.note(request("one", "two", "three", ""))
    assert holdings.summary(0, 0).documents == {"three": 2, "two": 2}
    holdings.note(request("two"))
    holdings.note(request("four"))
    assert set(holdings.summary(0, 0).documents) == {"two", "four"}


def test_documents_under_computation_are_not_held():
    holdings = Holdings(Store(), lambda: [])
    holdings.note(request("one", key=b"unready"))
    first = holdings.summary(1, 2)
    assert first.documents == {} and (first.running, first.waiting) == (1, 2)
    assert holdings.summary(0, 0).version == first.version
    holdings.note(request("two"))
    assert holdings.summary(0, 0).version != first.version


def test_a_tag_passes_the_wire():
    parts = (DocumentPart((1, 2), 0, "name", tag="abc"),)
    (part,) = parts_from_wire(parts_to_wire(parts), DocumentCache(), "")
    assert part.tag == "abc"


def test_short_documents_count_with_their_entries():
    documents = DocumentCache(num_bytes=20_000)
    contents = [
        parts_from_wire(parts_to_wire((DocumentPart((n, n), 0, "d", tag="t"),)), documents, "")[0]
        for n in range(30)
    ]
    again = [
        parts_from_wire(parts_to_wire((DocumentPart((n, n), 0, "d", tag="t"),)), documents, "")[0]
        for n in (29, 0)
    ]
    assert again[0].content is contents[29].content
    assert again[1].content is not contents[0].content
