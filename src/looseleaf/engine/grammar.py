"""Outputs that must follow a grammar: which tokens may come next, by the library llguidance.

The library knows grammars and a vocabulary's bytes; the bytes are our detokenizer's own, so what it
allows is what a reader of the text will see. It has no part in drawing and in ending outputs.
"""

from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from looseleaf.engine.json_schema import library_schema
from looseleaf.errors import InvalidRequest, install
from looseleaf.models.tokenizer import Tokenizer
from looseleaf.sampling_params import Grammar

_KEPT = 64
_LONGEST_REASON = 200
# JSON may hold any number of blanks, and a small model might never stop writing them: between two
# tokens of JSON there is nothing, a blank, or a new line with its indentation
_BLANKS = r"( |\n[ \t]{0,32})?"
# without \uXXXX: by it a free key could write a declared name again, with any value
_ESCAPES = 'nrbtf\\"'


class GrammarState:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._vocab_size = vocab_size

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def complete(self) -> bool:
        """Whether the text must end here."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Bool[Tensor, "vocab"]:
        """The tokens that may follow. Raises InvalidRequest if the grammar is too much to follow.

        End tokens are among them where the text may end."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little", count=self._vocab_size)
        return torch.from_numpy(bits.view(np.bool_))

    def push(self, token_id: int) -> None:
        """Take the next token. Raises InvalidRequest for one that was not allowed."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(
                f"the output can't go on as its grammar asks ({_reason(self._matcher)}): "
                "simplify the grammar, or check that logit_bias leaves it a token"
            )


class GrammarCompiler:
    """Grammars over one model's vocabulary; the latest are kept. Safe to share between threads.

    They are kept by salt: how long one takes tells nobody what somebody else has asked for."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._ends = sorted(i for i in tokenizer.eos_token_ids if i < vocab_size)
        self._matcher = lru_cache(maxsize=_KEPT)(self._compile)

    def check(self, grammar: Grammar, salt: str) -> None:
        """Compile ``grammar`` ahead. Raises InvalidRequest if it is none, or can't be followed."""
        self._matcher(grammar, salt)

    def start(self, grammar: Grammar, salt: str) -> GrammarState:
        """The beginning of an output under ``grammar``; raises as `check` does."""
        return GrammarState(self._matcher(grammar, salt).deep_copy(), self.vocab_size)

    def _compile(self, grammar: Grammar, _salt: str) -> Any:
        library = _library()
        try:
            matcher = library.LLMatcher(self._vocabulary, _source(grammar), log_level=0)
        except InvalidRequest:
            raise
        except ValueError as error:
            raise InvalidRequest(f"the {_name(grammar)} can't be read: {error}") from error
        if matcher.is_error():
            raise InvalidRequest(f"the {_name(grammar)} can't be followed: {_reason(matcher)}")
        # the first step shows what is only found out on the way: too large, or no way to begin
        first = GrammarState(matcher.deep_copy(), self.vocab_size).allowed()
        first[self._ends] = False
        if not first.any():
            raise InvalidRequest(f"the {_name(grammar)} allows no text: let it allow some")
        return matcher

    @cached_property
    def _vocabulary(self) -> Any:
        library = _library()
        words = _Words(self._tokenizer, self.vocab_size, self._ends)
        return library.LLTokenizer(library.TokenizerWrapper(words), eos_token=self._ends)


class _Words:
    """A vocabulary as llguidance wants it; its attribute names are not ours."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: list[int]) -> None:
        if not ends:
            raise InvalidRequest(
                "this model has no end-of-sequence token, so its outputs can't follow a grammar"
            )
        known = min(tokenizer.vocab_size, vocab_size)
        self.eos_token_id = ends[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(known)]
        self.tokens += [b""] * (vocab_size - known)
        self.special_token_ids = sorted(i for i in tokenizer.special_token_ids if i < vocab_size)
        self._encode = tokenizer.encode_continuation

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens whose bytes are those of ``text``, as far as the vocabulary has any."""
        spelled = text.encode() if isinstance(text, str) else text
        try:
            ids = self._encode(spelled.decode())
        except InvalidRequest:
            # a character without a token; the library calls this where nothing may be raised
            ids = []
        # normalizers change texts; what a grammar forces stays as it is
        joined = b"".join(self.tokens[i] for i in ids if i < len(self.tokens))
        return ids if joined == spelled else self._longest(spelled)

    def _longest(self, text: bytes) -> list[int]:
        """The longest token at each place, up to the first place without one."""
        ids: list[int] = []
        start = 0
        while start < len(text):
            lengths = range(min(self._most, len(text) - start), 0, -1)
            pieces = (self._ids.get(text[start : start + length]) for length in lengths)
            token_id = next((i for i in pieces if i is not None), None)
            if token_id is None:
                break
            ids.append(token_id)
            start += len(self.tokens[token_id])
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = {*self.special_token_ids}
        return {spelled: i for i, spelled in enumerate(self.tokens) if i not in special}

    @cached_property
    def _most(self) -> int:
        return max(map(len, self.tokens))


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InvalidRequest(
            f"outputs that follow a grammar need the package llguidance: {install('serve')}"
        ) from error
    return llguidance


def _source(grammar: Grammar) -> str:
    matcher = _library().LLMatcher
    if grammar.kind == "regex":
        source = matcher.grammar_from_regex(grammar.source)
    elif grammar.kind == "lark":
        source = matcher.grammar_from_lark(grammar.source)
    else:
        schema = grammar.source if grammar.kind == "json_schema" else '{"type": "object"}'
        options = {"whitespace_pattern": _BLANKS, "json_allowed_escapes": _ESCAPES}
        kept = library_schema(schema, grammar.strict)
        source = matcher.grammar_from_json_schema(kept, overrides=options)
    return str(source)


def _reason(matcher: Any) -> str:
    """The library's sentence without the state that it shows behind it, and without its options."""
    first, *rest = str(matcher.get_error()).strip().splitlines()
    if first.endswith(":"):
        # a parser quotes the text first, and says at the end what is wrong with it
        first += "".join(f" {line}" for line in rest if line.startswith("error: "))
    first = first.partition(" Enable '")[0]
    return first if len(first) <= _LONGEST_REASON else first[:_LONGEST_REASON] + "…"


def _name(grammar: Grammar) -> str:
    return {"regex": "regular expression", "lark": "grammar"}.get(grammar.kind, "JSON schema")
