"""Token masks of outputs under a grammar, by the library llguidance.

The library gets each token's bytes from the detokenizer, so masks agree with the decoded text.
Sampling and the end of an output are not the library's part.
"""

import json
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Any

from looseleaf.engine.json_schema.support import library_schema
from looseleaf.engine.sampling.call_blocks import CallBlock
from looseleaf.engine.sampling.grammar_state import CompiledGrammar, GrammarState, short_reason
from looseleaf.engine.sampling.rank_grammar import RankGrammar
from looseleaf.engine.sampling.triggered import TriggeredGrammar, TriggeredState
from looseleaf.errors import InvalidRequest, LimitExceeded, install
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.parallel import Ranks
from looseleaf.sampling_params import Grammar
from looseleaf.sandbox import Limits, Sandbox
from looseleaf.sandbox.grammars import greedy_encoder, make_matcher

_CACHE_SIZE = 64
_LIMITS = Limits(seconds=2.0, mib=1024)
# lower priority than other work of the machine
_NICE = 10
# JSON allows any number of blanks, and a small model may write them for ever: so a space or an
# indented line break at most
_BLANKS = r"( |\n[ \t]{0,32})?"
# without \uXXXX, in which a free key could repeat a declared name with any value
_ESCAPES = 'nrbtf\\"'
_JSON_OPTIONS = {"whitespace_pattern": _BLANKS, "json_allowed_escapes": _ESCAPES}


Compiled = CompiledGrammar | TriggeredGrammar
"""A grammar that holds from the begin of an output, or from a trigger on."""


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
        self._latest: OrderedDict[tuple[Grammar, str], Compiled] = OrderedDict()
        self._in_use: weakref.WeakValueDictionary[tuple[Grammar, str], Compiled]
        self._in_use = weakref.WeakValueDictionary()
        self.sandbox = Sandbox(
            "grammars",
            lambda: self._words.vocabulary(),
            what="grammar",
            subject="this request's grammar",
            advice="simplify the grammar",
            nice=_NICE,
        )

    def find(self, grammar: Grammar, salt: str) -> Compiled | None:
        """The compiled ``grammar`` from the cache, else None."""
        key = grammar, salt
        with self._lock:
            compiled = self._in_use.get(key)
            if compiled is None or compiled.is_spent:
                return None
            self._latest[key] = compiled
            self._latest.move_to_end(key)
            return compiled

    def compile(self, grammar: Grammar, salt: str, due: float = math.inf) -> Compiled:
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

    def start(self, grammar: Grammar, salt: str) -> GrammarState | TriggeredState | RankGrammar:
        """The state at the beginning of an output; compiles only if ``grammar`` is not in use.

        With several ranks only rank 0 compiles it. Raises as `compile`."""

        def start() -> GrammarState | TriggeredState:
            with self._lock:
                compiled = self._in_use.get((grammar, salt))
            return (compiled or self.compile(grammar, salt)).start()

        if self._ranks is None:
            return start()
        return RankGrammar(self._ranks.link, self._ranks.link.attempt("grammar", start))

    def _compile(self, grammar: Grammar, due: float) -> Compiled:
        if grammar.kind == "calls":
            return self._compile_calls(grammar, due)
        return self._compile_source(grammar, lambda: _source(grammar), due)

    def _compile_source(
        self, grammar: Grammar, make_source: Callable[[], str], due: float
    ) -> CompiledGrammar:
        try:
            source = make_source()
        except InvalidRequest:
            raise
        except ValueError as error:
            raise InvalidRequest(f"the {_name(grammar)} can't be read: {error}") from error
        if grammar.kind != "json_object":
            library_error = self.sandbox.call(source, _LIMITS, due)
            if library_error:
                raise _not_followed(grammar, short_reason(library_error))
        matcher = make_matcher(self._vocabulary, source)
        if matcher.is_error():
            raise _not_followed(grammar, short_reason(matcher.get_error()))
        compiled = CompiledGrammar(matcher, self.vocab_size)
        # the library detects oversized and empty grammars only at the first step
        first = compiled.start().allowed()
        first[self._ends] = False
        if not first.any():
            raise InvalidRequest(f"the {_name(grammar)} allows no text: let it allow some")
        return compiled

    def _compile_calls(self, grammar: Grammar, due: float) -> Compiled:
        """A block of calls, with any object for inexact schemas that can't be followed."""
        try:
            block = CallBlock.read(grammar.source)
            token = block.opens_with_token(self._added)
        except ValueError as error:
            raise InvalidRequest(f"the {_name(grammar)} can't be read: {error}") from error
        try:
            compiled = self._compile_block(grammar, block, due)
        except (InvalidRequest, LimitExceeded):
            if all(item.exact for item in block.schemas()):
                raise
            relaxed = block.relaxed(lambda schema: self._follows(schema, due))
            compiled = self._compile_block(grammar, relaxed, due)
        if not block.trigger:
            return compiled
        trigger = block.trigger.encode()
        return TriggeredGrammar(compiled, self._words.tokens, trigger, token, block.anchored)

    def _compile_block(self, grammar: Grammar, block: CallBlock, due: float) -> CompiledGrammar:
        def source() -> str:
            rest = block.without_trigger() if block.trigger else block
            lark = rest.lark(self._added, _inline_schema)
            return str(_library().LLMatcher.grammar_from_lark(lark))

        return self._compile_source(grammar, source, due)

    def _follows(self, schema: str, due: float) -> bool:
        """Whether outputs can follow a schema of arguments."""
        try:
            self._compile_source(
                (grammar := Grammar("json_schema", schema, strict=True)),
                lambda: _source(grammar),
                due,
            )
        except (InvalidRequest, LimitExceeded):
            return False
        return True

    @cached_property
    def _added(self) -> dict[str, int]:
        """The added tokens of texts by their written form; ends of texts are not among them.

        A text in the library's grammar would become other tokens than these."""
        ids = self._tokenizer.added_token_ids
        return {w: i for w, i in ids.items() if i < self.vocab_size and i not in self._ends}

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
        supported = library_schema(schema, grammar.strict)
        source = matcher.grammar_from_json_schema(supported, overrides=_JSON_OPTIONS)
    return str(source)


def _inline_schema(schema: str) -> str:
    """A closed schema with the library's options, as it stands inside of a larger grammar."""
    return json.dumps({**json.loads(library_schema(schema, True)), "x-guidance": _JSON_OPTIONS})


def _name(grammar: Grammar) -> str:
    names = {"regex": "regular expression", "lark": "grammar", "calls": "schema of the tools"}
    return names.get(grammar.kind, "JSON schema")


def _not_followed(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(f"the {_name(grammar)} can't be followed: {reason}")
