"""From a container's metadata to ``tokenizer.json`` and ``tokenizer_config.json``.

Two kinds of vocabularies are read. ``gpt2`` is byte-level BPE with merges, and a pre-tokenizer by
name. ``llama`` is SentencePiece with scores; its merges are all pairs of tokens whose join is a
token, in the order of its score.
"""

from typing import Any

from looseleaf.errors import CorruptCheckpoint, UnsupportedModel
from looseleaf.models.checkpoint.gguf.metadata import Metadata

Json = dict[str, Any]

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_KEY = "tokenizer.ggml."
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS = rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}"
_ONE_DIGIT = rf"{_WORDS}|\p{{N}}{_REST}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# pre-tokenizers by the name in tokenizer.ggml.pre: a pattern, or one of two known chains
_GPT2, _DIGITS = "gpt2", "digits"
_PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "olmo", "phi-2", "mpt"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), _THREE_DIGITS),
    **dict.fromkeys(("chatglm-bpe", "glm4", "smollm3"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _ONE_DIGIT),
    "tekken": _CASED,
}
# vocabularies in which a word that is a token needs no merges
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "smollm3", "tekken")
# models whose text is normalized before it is split
_COMPOSED = ("qwen2", "deepseek-r1-qwen")
# end tokens of known chat templates; a file states one or two ids
_END_TOKENS = frozenset(
    (
        *("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "</s>"),
        *("<end_of_turn>", "<|eom_id|>", "<|end_of_role|>", "<EOT>", "<eos>"),
    )
)
_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_files(data: Metadata) -> dict[str, Json]:
    """The JSON of each file by its name. Raises CorruptCheckpoint and UnsupportedModel."""
    kind = data.text(_KEY + "model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{_KEY}model {kind[:100]!r} is not supported: gpt2 (BPE) and llama (SentencePiece) are"
        )
    tokens = data.strings(_KEY + "tokens")
    types = data.numbers(_KEY + "token_type") if _KEY + "token_type" in data else [1] * len(tokens)
    if len(types) != len(tokens):
        raise CorruptCheckpoint(
            f"{_KEY}token_type has {len(types)} values, and there are {len(tokens)} tokens"
        )
    build = _byte_level if kind == "gpt2" else _sentence_piece
    added = [
        {
            **{"id": number, "content": token, "special": types[number] != _USER_DEFINED},
            **{"single_word": False, "lstrip": False, "rstrip": False, "normalized": False},
        }
        for number, token in enumerate(tokens)
        if types[number] in (_CONTROL, _USER_DEFINED)
        or (types[number] == _UNKNOWN and kind == "llama")
    ]
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    tokenizer |= build(data, tokens)
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _settings(data, tokens, kind)}


def end_ids(data: Metadata, tokens: list[str]) -> list[int]:
    """Ids of the tokens that end an answer: the stated ones, and known control tokens."""
    types = data.numbers(_KEY + "token_type") if _KEY + "token_type" in data else []
    ids = {
        n
        for n, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if token in _END_TOKENS and kind == _CONTROL
    }
    for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
        if _KEY + name in data:
            ids.add(data.whole(_KEY + name))
    return sorted(ids)


def _settings(data: Metadata, tokens: list[str], kind: str) -> Json:
    settings: Json = {"add_bos_token": data.flag(_KEY + "add_bos_token", kind == "llama")}
    for name, key in _NAMES.items():
        if _KEY + key in data:
            number = data.whole(_KEY + key)
            if number >= len(tokens):
                raise CorruptCheckpoint(f"{_KEY}{key} is {number}, of {len(tokens)} tokens")
            settings[name] = tokens[number]
    if "tokenizer.chat_template" in data:
        settings["chat_template"] = data.text("tokenizer.chat_template")
    return settings


def _byte_level(data: Metadata, tokens: list[str]) -> Json:
    name = data.text(_KEY + "pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{_KEY}pre {name[:100]!r} is not supported: {', '.join(sorted(_PRE_TOKENIZERS))} are"
        )
    pattern = _PRE_TOKENIZERS[name]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split: list[Json] = []
    if pattern == _DIGITS:
        split = [{"type": "Digits", "individual_digits": True}]
    elif pattern != _GPT2:
        regex = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        split = [{"type": "Split", **regex}]
    chain = [*split, {**byte_level, "use_regex": pattern in (_GPT2, _DIGITS)}]
    merges = [pair.split(" ", 1) for pair in data.strings(_KEY + "merges")]
    if any(len(pair) != 2 for pair in merges):
        raise CorruptCheckpoint(f"{_KEY}merges holds a merge that is not two tokens")
    return {
        "normalizer": {"type": "NFC"} if name in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": chain},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": _model(tokens, merges, ignore_merges=name in _WHOLE_WORDS),
    }


def _sentence_piece(data: Metadata, tokens: list[str]) -> Json:
    scores = data.numbers(_KEY + "scores")
    if len(scores) != len(tokens):
        raise CorruptCheckpoint(
            f"{_KEY}scores has {len(scores)} values, and there are {len(tokens)} tokens"
        )
    has_prefix = data.flag(_KEY + "add_space_prefix", True)
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix: list[Json] = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = tokens[data.whole(_KEY + "unknown_token_id", 0)]
    model = _model(tokens, _merges_of(tokens, scores), byte_fallback=True, unk_token=unknown)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {**model, "fuse_unk": True},
    }


def _model(tokens: list[str], merges: list[list[str]], **options: Any) -> Json:
    # a repeated token keeps its first id
    vocabulary = {token: number for number, token in reversed([*enumerate(tokens)])}
    defaults = {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    affixes = {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {
        "type": "BPE",
        **defaults,
        **affixes,
        **options,
        "vocab": vocabulary,
        "merges": merges,
    }


def _merges_of(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """All pairs whose join is a token: the best score first, then the shorter left token."""
    ids = {token: number for number, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut:])
            if pair[0] in ids and pair[1] in ids:
                merges.append((-score, cut, len(pair[1]), ids[pair[0]], ids[pair[1]], pair))
    merges.sort()
    return [[*pair] for *_, pair in merges]
