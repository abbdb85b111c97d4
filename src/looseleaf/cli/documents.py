"""Documents from what a command line names: files, folders, standard input."""

import sys
from collections.abc import Iterable
from pathlib import Path

from looseleaf.engine.request import Document, DocumentContext
from looseleaf.errors import EmptyDocument, InvalidRequest

TEXT_SUFFIXES = (".txt", ".md", ".rst")


def read_documents(names: Iterable[str], context: DocumentContext = "lead") -> list[Document]:
    """The documents of ``names``, in order; a folder stands for its text files, ``-`` for standard
    input.

    Raises InvalidRequest for a file that is missing or no text, EmptyDocument for one without any.
    """
    documents = []
    for name in names:
        if name == "-":
            text = _decode(sys.stdin.buffer.read(), "standard input")
            documents.append(_document("standard input", text, context))
            continue
        documents += [_document(path.name, _read(path), context) for path in _files(Path(name))]
    return documents


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        if not found:
            raise InvalidRequest(
                f"folder {path} holds no {', '.join(TEXT_SUFFIXES)} file: name files instead"
            )
        return found
    if not path.exists():
        raise InvalidRequest(f"no file {path}: check the path given with -d")
    return [path]


def _read(path: Path) -> str:
    try:
        return _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read: {error.strerror}") from error


def _decode(content: bytes, name: str) -> str:
    """UTF-8 text, whatever the platform's own encoding, with line ends as in a text file."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{name} is not UTF-8 text: convert it to a text file first"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _document(name: str, text: str, context: DocumentContext) -> Document:
    if not text.strip():
        raise EmptyDocument(f"{name} is empty: leave it out, or check that it is the file you mean")
    return Document(text, name=name, context=context)
