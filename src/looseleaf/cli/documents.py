"""Documents from what a command line names: files, folders, standard input."""

import sys
from collections.abc import Iterable
from pathlib import Path

import click

from looseleaf.errors import EmptyDocument, InvalidRequest
from looseleaf.prompt.request import Document, DocumentContext

TEXT_SUFFIXES = (".txt", ".md", ".rst")


def read_documents(names: Iterable[str], context: DocumentContext = "lead") -> list[Document]:
    """The documents of ``names``, in order; a folder stands for its text files, ``-`` for standard
    input. Files of a folder that are empty are left out, which standard error is told.

    Raises InvalidRequest for a file that is missing or no text, EmptyDocument for one without any.
    """
    documents = []
    for name in names:
        if name == "-":
            text = _decode(sys.stdin.buffer.read(), "standard input")
            documents.append(_document("standard input", text, context))
            continue
        texts = {path: _read(path) for path in _files(Path(name))}
        full = [path for path, text in texts.items() if text.strip()]
        if not full:
            raise EmptyDocument(
                f"{name} is empty: leave it out, or check that it is the one you mean"
            )
        for path in sorted(texts.keys() - set(full)):
            click.echo(f"{path} is empty and left out", err=True)
        documents += [Document(texts[path], name=path.name, context=context) for path in full]
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
