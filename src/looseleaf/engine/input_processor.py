"""The input processor: it checks a request and makes its sequences, samplers and stop checkers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

from looseleaf.config import Fuse, ModelConfig, Select
from looseleaf.engine.admission import Admission
from looseleaf.engine.features import Features
from looseleaf.engine.progress import OutputProgress, RequestProgress
from looseleaf.engine.reports.outputs import Arrivals, SelectReport
from looseleaf.engine.sampling.grammar import GrammarCompiler
from looseleaf.engine.sampling.state import SamplingState
from looseleaf.engine.sampling.stopping import StopChecker
from looseleaf.engine.sequence import FindHosted, Sequence
from looseleaf.errors import InvalidOption, InvalidRequest, PoolTooSmall, PromptTooLong
from looseleaf.kv.keys import SegmentKey
from looseleaf.models.tokenizer.detokenizer import Detokenizer
from looseleaf.models.tokenizer.tokenizer import Tokenizer
from looseleaf.prompt.placements import require_apart
from looseleaf.prompt.request import Request
from looseleaf.sparse import BreakEven, make_policy


@dataclass(frozen=True)
class InputProcessor:
    """Makes the outputs of requests, for one model and pool."""

    tokenizer: Tokenizer
    grammars: GrammarCompiler
    admission: Admission
    max_model_len: int
    model: ModelConfig
    features: Features
    break_even: BreakEven | None = None
    find_hosted: FindHosted = lambda key: None
    is_coming: Callable[[SegmentKey], bool] = lambda key: False

    def take(self, request: Request, seed: int) -> RequestProgress:
        """The progress of a new request; ``seed`` is used if the request has no seed.

        Raises a subclass of InvalidRequest if the request can never be served."""
        room = self.max_model_len - request.num_tokens
        if room < (request.params.max_tokens != 0):
            raise PromptTooLong(
                f"the prompt has {request.num_tokens} tokens, but the context holds "
                f"{self.max_model_len}, at least one of them for the answer: shorten the documents "
                "or raise max_model_len",
                "max_model_len",
            )
        fuse, num_layers = request.fuse, self.model.num_layers
        if fuse:
            require_apart(request, self.model)
        stored = num_layers - self.model.num_kv_shared
        if fuse and fuse.selector == "deviation" and fuse.check_layers[-1] >= stored:
            of_which = "" if stored == num_layers else " that store keys and values"
            raise InvalidOption(
                f"check_layers {fuse.check_layers} go past the model's {stored} layers{of_which}, "
                f"0 to {stored - 1}: leave out those it does not have",
                "check_layers",
            )
        select = request.select
        if select:
            request = self._settled(request, select)
            self._check_retrieval(request)
            _check_layers(select, num_layers)
            self.features.evictions.check(request)
        balanced = self._balance(request)
        if balanced is not None:
            request = replace(request, fuse=balanced[0])
        progress = RequestProgress(request, seed)
        if select and select.policy != "all":
            progress.select = SelectReport(select)
        for index in range(request.params.n):
            output = self._output(progress, index, room, seed)
            if balanced is not None:
                output.sequence.arrivals = Arrivals(ratio=balanced[1])
            progress.outputs.append(output)
        return progress

    def _settled(self, request: Request, select: Select) -> Request:
        """The request with the engine's default for ``dense_below``."""
        policy = make_policy(select, self.admission.page_size)
        if policy is None or select.dense_below is not None:
            return request
        below, window = 0, 1 if request.revise is None else request.revise.window
        if self.break_even is not None:
            below = self.break_even.tokens(select, policy, window)
        return replace(request, select=replace(select, dense_below=below))

    def _balance(self, request: Request) -> tuple[Fuse, float] | None:
        """The current budget of a policy that is balanced or has a budget in seconds, and its share
        of the tokens; None for other policies."""
        if request.fuse is None or not (request.fuse.balanced or request.fuse.seconds):
            return None
        plain, admission = replace(request, fuse=None), self.admission
        sequence = Sequence(plain, 0, admission.keys, admission.page_size, self.find_hosted)
        return admission.tiering.balance(request.fuse, sequence)

    def _check_retrieval(self, request: Request) -> None:
        """Raise InvalidRequest if ``select`` is ``retrieval`` and no document has an index."""
        if request.select is None or request.select.policy != "retrieval":
            return
        if request.fuse is not None and request.fuse.selector != "none":
            raise InvalidRequest(
                "fuse can't be combined with select='retrieval': tokens that are computed again "
                "would have to be hidden from the document's index; leave one of them out",
                "fuse",
                "select",
            )
        keys, page_size = self.admission.keys, self.admission.page_size
        sequence = Sequence(request, 0, keys, page_size, self.find_hosted)
        if sequence.hosted:
            return
        coming = [use.part.name for use in sequence.documents if self.is_coming(use.key)]
        if coming:
            raise InvalidRequest(
                f"select='retrieval' reads hosted documents by their index, and document "
                f"{coming[0]!r} is still being hosted: ask again when it is ready, or leave select "
                "out",
                "select",
            )
        raise InvalidRequest(
            "select='retrieval' reads hosted documents by their index, and none of this "
            "request's documents is hosted (under its salt, behind this beginning): host it "
            "first, or leave select out. A document is hosted behind the beginning of a chat, its "
            "system text included, so ask about it in a chat that begins so (llm.chat; or host "
            "Document(text, context='alone'), which is the same in every prompt)",
            "select",
        )

    def _output(
        self, progress: RequestProgress, index: int, room: int, seed: int
    ) -> OutputProgress:
        """Output ``index`` of a request for whose answers the context has ``room`` tokens."""
        request, params = progress.request, progress.request.params
        eos_token_ids = self.tokenizer.eos_token_ids
        sequence = Sequence(
            request, index, self.admission.keys, self.admission.page_size, self.find_hosted
        )
        if request.select or request.revise or request.fuse:
            self.features.register(sequence, request)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        limit = self._fitting(sequence, max_tokens, explicit=params.max_tokens is not None)
        grammar = None
        if params.grammar is not None:
            grammar = self.grammars.start(params.grammar, request.salt)
        sampling = SamplingState(
            params,
            # only penalties read the prompt, and thousands of int objects are slow to read
            request.token_ids if params.has_penalties else (),
            vocab_size=self.grammars.vocab_size,
            eos_token_ids=() if params.ignore_eos else eos_token_ids,
            child=index,
            seed=seed,
            grammar=grammar,
        )
        stop = StopChecker(
            params if request.decodes else replace(params, stop=()),
            max_tokens=limit,
            eos_token_ids=eos_token_ids,
        )
        stream = answer_stream(self.tokenizer, request) if request.decodes else None
        return OutputProgress(progress, sequence, sampling, stop, stream)

    def _fitting(self, sequence: Sequence, max_tokens: int, *, explicit: bool) -> int:
        """The number of output tokens that fit the pool; raises PoolTooSmall if it is too low."""
        pool = self.admission.store.pool.num_pages
        pinned = self.admission.pinned_pages_beside(sequence)
        total = pool - pinned
        least = self.admission.pages_needed(sequence, 1 if sequence.draws else 0)
        most = self.admission.pages_needed(sequence, max_tokens)
        needed = most if explicit and not sequence.warms else least
        if needed > total:
            page_size = self.admission.page_size
            # the number of pinned pages is private to their tenants
            hosted = any(self.find_hosted(use.key) for use in sequence.documents)
            raise PoolTooSmall(
                f"the request needs {needed} pages of {page_size} tokens for "
                f"{sequence.num_prompt_tokens} prompt tokens and its answer, but the pool has "
                f"{pool}{', less those of pinned documents' if pinned else ''}: "
                "enlarge the cache (num_pages), shorten the documents or lower max_tokens"
                + ("; or ask with select='retrieval', since one is hosted" if hosted else ""),
                *("num_pages", "max_tokens", "select"),
            )
        if most <= total:
            return max_tokens
        tail = sequence.tail.num_tokens
        fixed = self.admission.pages_needed(sequence, 0) - self.admission.pages_for(tail)
        return (total - fixed) * self.admission.page_size - tail


def answer_stream(tokenizer: Tokenizer, request: Request) -> Detokenizer:
    """The decoder of an output of ``request``."""
    stream = tokenizer.stream(request.params.skip_special_tokens)
    if not request.opens_answer:
        stream.follow(chain.from_iterable(part.tokens for part in request.parts))
    return stream


def _check_layers(select: Select, num_layers: int) -> None:
    """Raise InvalidOption if the layers of ``select`` do not fit the model."""
    if set(range(num_layers)) <= set(select.layers_read_densely):
        raise InvalidOption(
            f"select would leave all {num_layers} layers of the model dense: give "
            "dense_layers with fewer of them, or leave select out",
            "select",
            "dense_layers",
        )
    for name in ("dense_layers", "anchors"):
        layers = getattr(select, name)
        if any(layer >= num_layers for layer in layers or ()):
            raise InvalidOption(
                f"{name} {layers} go past the model's {num_layers} layers, 0 to "
                f"{num_layers - 1}: leave out those it does not have",
                name,
            )
    weights = select.layer_budgets
    if isinstance(weights, tuple) and len(weights) != num_layers:
        raise InvalidOption(
            f"layer_budgets have {len(weights)} weights, but the model {num_layers} layers: give "
            "one for each, also for those that are dense",
            "layer_budgets",
        )
