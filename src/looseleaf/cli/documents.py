"""Documents of a command line: from files, folders, or standard input."""

import sys
from collections.abc import Iterable
from pathlib import Path

import click

from looseleaf.errors import EmptyDocument, InvalidRequest
from looseleaf.prompt.request import Document, DocumentContext

TEXT_SUFFIXES = (".txt", ".md", ".rst")


def read_documents(names: Iterable[str], context: DocumentContext = "lead") -> list[Document]:
    """The documents of ``names``, in order: files, the text files of folders, ``-`` for stdin.

    Skips empty files of folders, with a message on standard error. Raises InvalidRequest for a file
    that is missing or not text, EmptyDocument for a file, folder or input without text.
    """
    documents = []
    for name in names:
        if name == "-":
            text = _decode(sys.stdin.buffer.read(), "standard input")
            documents.append(_document("standard input", text, context))
            continue
        texts = {path: _read(path) for path in _files(Path(name))}
        nonempty = [path for path, text in texts.items() if text.strip()]
        if not nonempty:
            raise EmptyDocument(f"{name} is empty: leave it out, or check the path")
        for path in sorted(texts.keys() - set(nonempty)):
            click.echo(f"{path} is empty and skipped", err=True)
        documents += [Document(texts[path], name=path.name, context=context) for path in nonempty]
    return documents


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        if not files:
            raise InvalidRequest(
                f"folder {path} has no {', '.join(TEXT_SUFFIXES)} file: name files instead"
            )
        return files
    if not path.exists():
        raise InvalidRequest(f"no file {path}: check the path")
    return [path]


def _read(path: Path) -> str:
    try:
        return _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read: {error.strerror}") from error


def _decode(content: bytes, name: str) -> str:
    """The UTF-8 text of ``content``, with universal newlines."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{name} is not UTF-8 text: convert it to a text file first"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _document(name: str, text: str, context: DocumentContext) -> Document:
    if not text.strip():
        raise EmptyDocument(f"{name} is empty: leave it out, or give it text")
    return Document(text, name=name, context=context)
