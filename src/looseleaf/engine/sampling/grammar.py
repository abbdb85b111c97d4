"""Token masks of outputs under a grammar, by the library llguidance.

The library gets each token's bytes from the detokenizer, so masks agree with the decoded text.
Sampling and the end of an output are not the library's part.
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

from looseleaf.engine.json_schema.support import library_schema
from looseleaf.errors import InvalidRequest, install
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.parallel import Link, Ranks
from looseleaf.sampling_params import Grammar
from looseleaf.sandbox import Limits, Sandbox
from looseleaf.sandbox.grammars import first_line, greedy_encoder, make_matcher

_CACHE_SIZE = 64
_LIMITS = Limits(seconds=2.0, mib=1024)
# lower priority than other work of the machine
_NICE = 10
_MAX_REASON = 200
# JSON allows any number of blanks, and a small model may write them for ever: so a space or an
# indented line break at most
_BLANKS = r"( |\n[ \t]{0,32})?"
# without \uXXXX, in which a free key could repeat a declared name with any value
_ESCAPES = 'nrbtf\\"'


class GrammarState:
    """The position of an output in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, origin: "CompiledGrammar") -> None:
        self._matcher = matcher
        self._origin = origin
        self._mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._vocab_size = vocab_size

    @property
    def accepting(self) -> bool:
        """Whether the text may end."""
        return bool(self._matcher.is_accepting())

    @property
    def complete(self) -> bool:
        """Whether the text must end."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Bool[Tensor, "vocab"]:
        """The mask of the tokens that may follow, with end tokens if the text may end.

        Raises InvalidRequest if the grammar exceeds the library's limits."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little", count=self._vocab_size)
        return torch.from_numpy(bits.view(np.bool_))

    def push(self, token_id: int) -> None:
        """Append a token. Raises InvalidRequest if the grammar does not allow it."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            # all outputs of a compiled grammar share the library's limits
            self._origin.is_spent = True
            raise InvalidRequest(
                f"the output can't go on as its grammar asks ({_reason(self._matcher)}): "
                "simplify the grammar, or check that logit_bias leaves it a token"
            )


class RankGrammar(GrammarState):
    """The position of an output in its grammar, which rank 0 has (``own``), for all ranks.

    Only rank 0 asks for masks."""

    def __init__(self, link: Link, own: GrammarState | None) -> None:
        self._link, self._own, self._is_complete = link, own, False

    @property
    def accepting(self) -> bool:
        return self._lead.accepting

    @property
    def complete(self) -> bool:
        return self._is_complete

    def allowed(self) -> Bool[Tensor, "vocab"]:
        return self._lead.allowed()

    def push(self, token_id: int) -> None:
        def push() -> bool:
            self._lead.push(token_id)
            return self._lead.complete

        self._is_complete = self._link.decide("grammar", push)

    @property
    def _lead(self) -> GrammarState:
        assert self._own is not None, "only rank 0 samples"
        return self._own


class CompiledGrammar:
    """A grammar over a vocabulary. ``is_spent`` is set once an output exceeds a limit."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self.is_spent = False

    def start(self) -> GrammarState:
        """The state at the beginning of an output."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size, self)


class GrammarCompiler:
    """Compiles grammars over a model's vocabulary, and caches the latest and all in use.

    A grammar first compiles in a sandbox, so compiling it again in this process is bounded. Entries
    are per salt, so compile times reveal no other tenant's grammars. Safe to share between threads.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ranks: Ranks | None = None) -> None:
        self._tokenizer, self._ranks = tokenizer, ranks
        self.vocab_size = vocab_size
        self._ends = sorted(i for i in tokenizer.eos_token_ids if i < vocab_size)
        self._lock = threading.Lock()
        self._latest: OrderedDict[tuple[Grammar, str], CompiledGrammar] = OrderedDict()
        self._in_use: weakref.WeakValueDictionary[tuple[Grammar, str], CompiledGrammar]
        self._in_use = weakref.WeakValueDictionary()
        self.sandbox = Sandbox(
            "grammars",
            lambda: self._words.vocabulary(),
            what="grammar",
            subject="this request's grammar",
            advice="simplify the grammar",
            nice=_NICE,
        )

    def find(self, grammar: Grammar, salt: str) -> CompiledGrammar | None:
        """The compiled ``grammar`` from the cache, else None."""
        key = grammar, salt
        with self._lock:
            compiled = self._in_use.get(key)
            if compiled is None or compiled.is_spent:
                return None
            self._latest[key] = compiled
            self._latest.move_to_end(key)
            return compiled

    def compile(self, grammar: Grammar, salt: str, due: float = math.inf) -> CompiledGrammar:
        """``grammar`` from the cache, or compiled now; it stays cached while a reference exists.

        ``due`` is the deadline in monotonic seconds. Raises InvalidRequest for a malformed or
        unsupported grammar, LimitExceeded and DeadlineExceeded."""
        compiled = self.find(grammar, salt)
        if compiled is not None:
            return compiled
        compiled = self._compile(grammar, due)
        key = grammar, salt
        with self._lock:
            self._latest[key] = self._in_use[key] = compiled
            if len(self._latest) > _CACHE_SIZE:
                self._latest.popitem(last=False)
        return compiled

    def start(self, grammar: Grammar, salt: str) -> GrammarState:
        """The state at the beginning of an output; compiles only if ``grammar`` is not in use.

        With several ranks only rank 0 compiles it. Raises as `compile`."""

        def start() -> GrammarState:
            with self._lock:
                compiled = self._in_use.get((grammar, salt))
            return (compiled or self.compile(grammar, salt)).start()

        if self._ranks is None:
            return start()
        return RankGrammar(self._ranks.link, self._ranks.link.attempt("grammar", start))

    def _compile(self, grammar: Grammar, due: float) -> CompiledGrammar:
        try:
            source = _source(grammar)
        except InvalidRequest:
            raise
        except ValueError as error:
            raise InvalidRequest(f"the {_name(grammar)} can't be read: {error}") from error
        if grammar.kind != "json_object":
            library_error = self.sandbox.call(source, _LIMITS, due)
            if library_error:
                raise _not_followed(grammar, library_error)
        matcher = make_matcher(self._vocabulary, source)
        if matcher.is_error():
            raise _not_followed(grammar, first_line(matcher.get_error()))
        compiled = CompiledGrammar(matcher, self.vocab_size)
        # the library detects oversized and empty grammars only at the first step
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
    """A vocabulary with the attribute names that llguidance requires."""

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
        # the library encodes forced text in the engine's thread, which must not wait for a sandbox
        guarded = tokenizer.needs_sandbox
        self._encode = self._longest if guarded else tokenizer.encode_continuation
        self._ends = ends

    def vocabulary(self) -> dict[str, Any]:
        """The vocabulary as a JSON object, for the sandbox."""
        return {
            "ends": self._ends,
            "bos": self.bos_token_id,
            "special": self.special_token_ids,
            # a character per byte
            "tokens": [token.decode("latin-1") for token in self.tokens],
        }

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens with the bytes of ``text``, as far as the vocabulary has them."""
        spelled = text.encode() if isinstance(text, str) else text
        try:
            ids = self._encode(spelled.decode())
        except InvalidRequest:
            # a character without a token; the library's callback must not raise
            ids = []
        # a normalizer may change the text, which must stay exact
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
        supported = library_schema(schema, grammar.strict)
        source = matcher.grammar_from_json_schema(supported, overrides=options)
    return str(source)


def _reason(matcher: Any) -> str:
    return _cut(first_line(matcher.get_error()))


def _cut(first: str) -> str:
    return first if len(first) <= _MAX_REASON else first[:_MAX_REASON] + "…"


def _name(grammar: Grammar) -> str:
    return {"regex": "regular expression", "lark": "grammar"}.get(grammar.kind, "JSON schema")


def _not_followed(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(f"the {_name(grammar)} can't be followed: {_cut(reason)}")
