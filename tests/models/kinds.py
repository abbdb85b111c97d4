"""One small tokenizer of each kind in the field, without chat template."""

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_PIECES = ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "é", "▁▁", "▁▁a"]
_MERGES = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b"), ("▁", "▁"), ("▁▁", "a")]


def _merging() -> Backend:
    pieces = ["<unk>", "<s>", "</s>", *_BYTES, *_PIECES]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    return Backend(
        models.BPE(vocabulary, _MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )


def _prepending() -> Backend:
    backend = _merging()
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    start = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*start, decoders.Strip(" ", 1, 0)])
    return backend


def _metaspace(scheme: str, split: bool = False) -> Backend:
    backend = _merging()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    last = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    start = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*start, *last])
    return backend


def _unigram() -> Backend:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((byte, -9.0) for byte in _BYTES)]
    pieces += [(piece, -4.0 + 0.1 * n) for n, piece in enumerate(_PIECES)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    start = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*start, decoders.Strip(" ", 1, 0)])
    return backend


def _byte_level(prefix: bool) -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<unk>", "<s>", "</s>", *alphabet, "ab", "Ġa", "Ġab"]
    merges = [("a", "b"), ("Ġ", "a"), ("Ġa", "b")]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "byte level": lambda: _byte_level(prefix=False),
    "byte level with a space": lambda: _byte_level(prefix=True),
    "prepend": _prepending,
    "metaspace first": lambda: _metaspace("first"),
    "metaspace always": lambda: _metaspace("always", split=True),
    "metaspace never": lambda: _metaspace("never"),
    "unigram": _unigram,
}


def write_kind(folder: Path, kind: str) -> Path:
    """A tokenizer of ``kind`` with the markers ``<s>`` and ``</s>``, in a new ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = KINDS[kind]()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
