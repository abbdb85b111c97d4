"""Outputs that must follow a grammar: which tokens may come next, by the library llguidance.

The library knows grammars and a vocabulary's bytes; the bytes are our detokenizer's own, so what it
allows is what a reader of the text will see. It has no part in drawing and in ending outputs.
"""

import math
import threading
import weakref
from collections import OrderedDict
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from looseleaf.engine.json_schema import library_schema
from looseleaf.errors import InvalidRequest, install
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.sampling_params import Grammar
from looseleaf.sandbox import Limits, Sandbox
from looseleaf.sandbox.grammars import first_line, greedy_encoder, make_matcher

_KEPT = 64
_LIMITS = Limits(seconds=2.0, mib=1024)
# other work of the machine comes first
_NICE = 10
_LONGEST_REASON = 200
# JSON may hold any number of blanks, and a small model might never stop writing them: between two
# tokens of JSON there is nothing, a blank, or a new line with its indentation
_BLANKS = r"( |\n[ \t]{0,32})?"
# without \uXXXX: by it a free key could write a declared name again, with any value
_ESCAPES = 'nrbtf\\"'


class GrammarState:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, origin: "CompiledGrammar") -> None:
        self._matcher = matcher
        self._origin = origin
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
            # all outputs of a compiled grammar share what the library remembers, and its limit
            self._origin.is_spent = True
            raise InvalidRequest(
                f"the output can't go on as its grammar asks ({_reason(self._matcher)}): "
                "simplify the grammar, or check that logit_bias leaves it a token"
            )


class CompiledGrammar:
    """A grammar over one vocabulary, ready to begin outputs."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self.is_spent = False

    def start(self) -> GrammarState:
        """The beginning of an output."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size, self)


class GrammarCompiler:
    """Grammars over one model's vocabulary; the latest are kept, and those that a caller holds.

    A grammar compiles in a process under limits first, so the same work here ends as well. They
    are kept by salt: how long one takes tells nobody what somebody else has asked for. Safe to
    share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._ends = sorted(i for i in tokenizer.eos_token_ids if i < vocab_size)
        self._lock = threading.Lock()
        self._latest: OrderedDict[tuple[Grammar, str], CompiledGrammar] = OrderedDict()
        self._in_use: weakref.WeakValueDictionary[tuple[Grammar, str], CompiledGrammar]
        self._in_use = weakref.WeakValueDictionary()
        self.sandbox = Sandbox(
            "grammars",
            lambda: self._words.described(),
            what="grammar",
            subject="this request's grammar",
            advice="simplify the grammar",
            nice=_NICE,
        )

    def find(self, grammar: Grammar, salt: str) -> CompiledGrammar | None:
        """``grammar`` if it is compiled. Takes no time."""
        key = grammar, salt
        with self._lock:
            compiled = self._in_use.get(key)
            if compiled is None or compiled.is_spent:
                return None
            self._latest[key] = compiled
            self._latest.move_to_end(key)
            return compiled

    def compile(self, grammar: Grammar, salt: str, due: float = math.inf) -> CompiledGrammar:
        """``grammar``, compiled now unless it is; whoever holds it finds it again.

        ``due`` is the deadline in monotonic seconds. Raises InvalidRequest if it is none or can't
        be followed, LimitExceeded and DeadlineExceeded."""
        compiled = self.find(grammar, salt)
        if compiled is not None:
            return compiled
        compiled = self._compile(grammar, due)
        key = grammar, salt
        with self._lock:
            self._latest[key] = self._in_use[key] = compiled
            if len(self._latest) > _KEPT:
                self._latest.popitem(last=False)
        return compiled

    def start(self, grammar: Grammar, salt: str) -> GrammarState:
        """The beginning of an output under ``grammar``, without a wait where a caller holds it;
        else as `compile`."""
        with self._lock:
            compiled = self._in_use.get((grammar, salt))
        return (compiled or self.compile(grammar, salt)).start()

    def _compile(self, grammar: Grammar, due: float) -> CompiledGrammar:
        try:
            source = _source(grammar)
        except InvalidRequest:
            raise
        except ValueError as error:
            raise InvalidRequest(f"the {_name(grammar)} can't be read: {error}") from error
        if grammar.kind != "json_object":
            error_of_library = self.sandbox.call(source, _LIMITS, due)
            if error_of_library:
                raise _not_followed(grammar, error_of_library)
        matcher = make_matcher(self._vocabulary, source)
        if matcher.is_error():
            raise _not_followed(grammar, first_line(matcher.get_error()))
        compiled = CompiledGrammar(matcher, self.vocab_size)
        # the first step shows what is only found out on the way: too large, or no way to begin
        first = compiled.start().allowed()
        first[self._ends] = False
        if not first.any():
            raise InvalidRequest(f"the {_name(grammar)} allows no text: let it allow some")
        return compiled

    @cached_property
    def _vocabulary(self) -> Any:
        library = _library()
        return library.LLTokenizer(library.TokenizerWrapper(self._words), eos_token=self._ends)

    @cached_property
    def _words(self) -> "_Words":
        return _Words(self._tokenizer, self.vocab_size, self._ends)


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
        self._longest = greedy_encoder(self.tokens, {*self.special_token_ids})
        # the library encodes forced text in the engine's thread, which waits for no process
        guarded = tokenizer.needs_sandbox
        self._encode = self._longest if guarded else tokenizer.encode_continuation
        self._ends = ends

    def described(self) -> dict[str, Any]:
        """The vocabulary as JSON has it, for another process."""
        return {
            "ends": self._ends,
            "bos": self.bos_token_id,
            "special": self.special_token_ids,
            # each byte as the character of its number
            "tokens": [token.decode("latin-1") for token in self.tokens],
        }

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
    return _cut(first_line(matcher.get_error()))


def _cut(first: str) -> str:
    return first if len(first) <= _LONGEST_REASON else first[:_LONGEST_REASON] + "…"


def _name(grammar: Grammar) -> str:
    return {"regex": "regular expression", "lark": "grammar"}.get(grammar.kind, "JSON schema")


def _not_followed(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(f"the {_name(grammar)} can't be followed: {_cut(reason)}")
