"""Tokenizer settings in the files beside tokenizer.json.

They are named tokens, BOS, end tokens and the templates of conversations and documents.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looseleaf.errors import CorruptCheckpoint
from looseleaf.models.checkpoint.fields import mapping, shown, switch, text
from looseleaf.models.checkpoint.files import read_json, read_text
from looseleaf.models.tokenizer.chat_template import ChatTemplate

DEFAULT_DOCUMENT_TEMPLATE = "{text}\n\n"
_NAME = "tokenizer_config.json"
_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
# ids fit 32 bits
_MAX_IDS = 2**31


class TokenizerSettings:
    """tokenizer_config.json, and the older special_tokens_map.json for missing fields.

    ``named_tokens`` maps names such as ``eos_token`` to written forms. ``added_tokens`` are written
    forms. ``add_bos_token`` is None if the files do not set it. Raises CorruptCheckpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        raw = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / _NAME)}
        try:
            self.named_tokens = _named_tokens(raw)
            self.added_tokens = _added_tokens(raw)
            self.add_bos_token = (
                None if raw.get("add_bos_token") is None else switch(raw, "add_bos_token")
            )
            self.document_template = _document_template(raw)
            self._templates = _templates(raw.get("chat_template"))
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(f"{folder / _NAME}: {error}") from error

    def chat_templates(self) -> dict[str, ChatTemplate]:
        """Compiled templates by name; if not empty, a ``default`` is included."""
        sources = dict(self._templates)
        for path in (self._folder / "additional_chat_templates").glob("*.jinja"):
            sources[path.stem] = read_text(path)
        if (self._folder / "chat_template.jinja").is_file():
            sources["default"] = read_text(self._folder / "chat_template.jinja")
        if sources and "default" not in sources:
            sources["default"] = next(iter(sources.values()))
        try:
            return {name: ChatTemplate(source) for name, source in sources.items()}
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(f"{self._folder}: {error}") from error

    def end_ids(self) -> set[int]:
        """End tokens of generation_config.json, or else of the often older config.json."""
        names = ("generation_config.json", "config.json")
        return next(filter(None, (_end_ids(self._folder / name) for name in names)), set())


def _named_tokens(raw: Mapping[str, Any]) -> dict[str, str]:
    named = {name: raw.get(name) for name in _NAMED_TOKENS}
    contents = {n: v.get("content") if isinstance(v, Mapping) else v for n, v in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _added_tokens(raw: Mapping[str, Any]) -> list[str]:
    stated = mapping(raw, "added_tokens_decoder").values()
    return [text(v, "content", "") if isinstance(v, Mapping) else str(v) for v in stated]


def _document_template(raw: Mapping[str, Any]) -> str:
    template = text(raw, "document_template", DEFAULT_DOCUMENT_TEMPLATE)
    if template.count("{text}") != 1:
        raise CorruptCheckpoint(
            "document_template must say once where the {text} of a document stands, not "
            f"{shown(template)}; correct it"
        )
    return template


def _templates(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    items = [] if value is None else value if isinstance(value, list) else [value]
    named = [(i.get("name"), i.get("template")) for i in items if isinstance(i, Mapping)]
    if len(named) < len(items) or not all(isinstance(x, str) for pair in named for x in pair):
        raise CorruptCheckpoint(
            "chat_template must be a string, or a list of objects that have a name and a template; "
            "correct it"
        )
    return {str(name): str(template) for name, template in named}


def _end_ids(path: Path) -> set[int]:
    value = read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    # bool is a subclass of int
    if not all(type(i) is int and 0 <= i < _MAX_IDS for i in ids):
        raise CorruptCheckpoint(
            f"{path}: eos_token_id must be a token's id or a list of ids, not {shown(value)}; "
            "correct it"
        )
    return set(ids)
