"""Laws 2 to 6 on whole answers: the engine's logits against dense passes of the model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from looseleaf.config import EVICTING, Fuse, Revise, Select, SelectPolicy
from looseleaf.errors import InvalidRequest
from looseleaf_lab.conformance.definition import SHIFTS, HeadStates, wider
from looseleaf_lab.conformance.subject import ScriptedEngine, ScriptedRequest, Subject
from looseleaf_lab.conformance.verdict import Comparison, Finding, largest


@dataclass(frozen=True)
class DenseLogits:
    """True logits of an answer, and samples of plain passes: ``[script, vocab]``, with a leading
    dimension for samples."""

    truth: Tensor
    plain: Tensor


class Answers:
    """A subject and the dense passes over its cases, each computed once."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.reused = cache(self._reused)
        self.full = cache(self._full)

    def _reused(self, request: ScriptedRequest) -> DenseLogits:
        """Logits with documents as stored."""
        visibility = self.subject.definition.reused(request.parts, len(request.script) - 1)
        return self._dense_logits(request, visibility)

    def _full(self, request: ScriptedRequest) -> DenseLogits:
        """Logits of full causal attention."""
        return self._dense_logits(request, self.subject.definition.full(request.tokens))

    def blended(self, request: ScriptedRequest, recomputed: Sequence[int]) -> DenseLogits:
        """Logits when the document tokens at ``recomputed`` are computed again in place.

        Text and these tokens see each other's new keys and values, and stored ones of the rest."""
        definition, tokens = self.subject.definition, request.tokens
        stored_readings = definition.reused(request.parts, len(request.script) - 1)
        text = stored_readings[-1].rows
        again = torch.tensor([*recomputed], dtype=torch.int64, device=text.device)
        rows = torch.cat([text, again]).unique()
        all_tokens = torch.arange(len(tokens), device=text.device)
        index = torch.arange(len(rows), device=text.device)
        reading = type(stored_readings[-1])(index, all_tokens, rows, all_tokens)

        def logits(dtype: torch.dtype, shift: int) -> Tensor:
            stored = HeadStates()
            definition.hidden(tokens, stored_readings, dtype, shift=shift, keep=stored)
            hidden = definition.hidden(
                tokens, [reading], dtype, shift=shift, stored=stored, rows=rows
            )
            return definition.logits(hidden[-len(request.script) :])

        return self._samples(logits)

    def compare(
        self, label: str, answers: Sequence[Tensor], dense_logits: Sequence[DenseLogits]
    ) -> Comparison:
        """Answers to several requests as one comparison."""
        truth = torch.cat([expected.truth for expected in dense_logits])
        plain = torch.cat([expected.plain for expected in dense_logits], 1)
        return Comparison(label, torch.cat([*answers]), truth, plain, self.subject.dtype)

    def _dense_logits(self, request: ScriptedRequest, visibility: Any) -> DenseLogits:
        definition = self.subject.definition

        def logits(dtype: torch.dtype, shift: int) -> Tensor:
            states = definition.hidden(request.tokens, visibility, dtype, shift=shift)
            return definition.logits(states[-len(request.script) :])

        return self._samples(logits)

    def _samples(self, logits: Any) -> DenseLogits:
        dtype = self.subject.dtype
        plain = torch.stack([logits(dtype, shift).float() for shift in SHIFTS])
        return DenseLogits(logits(wider(dtype), 0), plain)


def answers_at_offsets(answers: Answers) -> list[Finding]:
    """Law 2: a document after its lead is exact; several are read at their offsets, first computed
    and then from the cache."""
    subject, cases = answers.subject, answers.subject.cases
    (exact,) = subject.scripted_engine().run([cases.one_document])
    engine = subject.scripted_engine()
    (cold,) = engine.run([cases.several])
    engine.run(cases.sharing[:2])
    (warm_logits,) = engine.run([cases.several])
    full, reused = answers.full(cases.one_document), answers.reused(cases.several)
    return [
        answers.compare("an exact document against full attention", [exact], [full]).finding(),
        answers.compare("documents at their offsets, computed", [cold], [reused]).finding(),
        answers.compare("the same, found in the cache", [warm_logits], [reused]).finding(),
    ]


def sharing_of_answers(answers: Answers) -> tuple[list[Finding], bool]:
    """Law 3: requests that share documents at different offsets, grouped and ungrouped."""
    subject, cases = answers.subject, answers.subject.cases
    requests = [cases.several, *cases.sharing]
    grouped, ungrouped = subject.scripted_engine(), subject.scripted_engine(grouping=False)
    grouped_logits, ungrouped_logits = grouped.run(requests), ungrouped.run(requests)
    comparison = answers.compare(
        f"{len(requests)} answers, grouped",
        grouped_logits,
        [answers.reused(request) for request in requests],
    )
    between = comparison.against("the same, ungrouped against grouped", torch.cat(ungrouped_logits))
    return [comparison.finding(), between], grouped.grouped_rows > 0


def blending(answers: Answers) -> list[Finding]:
    """Law 4: all document tokens recomputed, none, and a share."""
    subject, cases = answers.subject, answers.subject.cases
    request, engine = cases.several, subject.scripted_engine()

    def fused(fuse: Fuse | None) -> tuple[Tensor, list[int]]:
        fused_request = ScriptedRequest(request.parts, request.script, fuse)
        ((logits, progress),) = engine.run_with_progress([fused_request])
        fusion = progress.outputs[0].sequence.fusion
        return logits, fusion.chosen_positions if fusion else []

    full, reused = answers.full(request), answers.reused(request)
    plain, _ = fused(None)
    all_again = answers.compare("ratio 1 against full prefill", [fused(Fuse("all"))[0]], [full])
    none_again = answers.compare("ratio 0 against the definition", [plain], [reused])
    zero = none_again.against("against plain reuse", fused(Fuse("random", ratio=0.0))[0])
    findings = [all_again.finding(), none_again.finding(), zero]
    for fuse in (Fuse("random", ratio=0.3), Fuse("links", ratio=0.15)):
        logits, recomputed = fused(fuse)
        label = f"{fuse}, rows see nothing later"
        findings.append(
            answers.compare(label, [logits], [answers.blended(request, recomputed)]).finding()
        )
    return findings


def selection(answers: Answers) -> list[Finding]:
    """Law 5: whole answers with a full budget, and revision of a single row."""
    subject, cases = answers.subject, answers.subject.cases
    request, engine = cases.several, subject.scripted_engine()
    everything = Select("quest", ratio=1.0, dense_layers=(), dense_below=0)
    (full,) = engine.run([replace(request, select=everything, revise=Revise(3))])
    comparison = answers.compare(
        "answers with a full budget and a window of 3", [full], [answers.reused(request)]
    )
    small_budget = Select(
        "quest", tokens=3 * subject.page_size + 16, dense_layers=(), dense_below=0
    )
    (base,) = engine.run([replace(request, select=small_budget)])
    (revised,) = engine.run([replace(request, select=small_budget, revise=Revise(1))])
    bits = largest(revised.double() - base.double())
    return [
        comparison.finding(),
        Finding("answers with a small budget, window 1 against none, to the bit", bits, 0.0),
        *(_keeping_everything(answers, policy) for policy in EVICTING),
        _retrieving_everything(answers),
    ]


def _keeping_everything(answers: Answers, policy: SelectPolicy) -> Finding:
    """An answer by a policy that evicts keys, with room for all of them."""
    subject, request = answers.subject, answers.subject.cases.text_only
    label = f"an answer by {policy} with room for all keys"
    select = Select(policy, tokens=subject.tokens)
    try:
        logits = subject.scripted_engine().run([replace(request, select=select)])
    except InvalidRequest:
        return _rejected(policy)
    return answers.compare(label, logits, [answers.reused(request)]).finding()


def _retrieving_everything(answers: Answers) -> Finding:
    """An answer over a host-resident document whose every key is retrieved."""
    subject, cases = answers.subject, answers.subject.cases
    engine, request = (
        subject.scripted_engine(),
        cases.request(cases.lead, 0, cases.between, 1, cases.question),
    )
    try:
        engine.host(request, 1)
        logits = engine.run([replace(request, select=Select("retrieval", ratio=1.0))])
    except InvalidRequest:
        return _rejected("retrieval")
    comparison = answers.compare(
        "an answer that retrieves every key", logits, [answers.reused(request)]
    )
    return comparison.finding()


def _rejected(policy: SelectPolicy) -> Finding:
    """A passing finding: the model rejects the policy."""
    return Finding(f"{policy} is refused here", 0.0, 0.0)


def independence(answers: Answers) -> list[Finding]:
    """Law 6: equal answers cold, warm, alone, in small chunks, and without prefix caching."""
    subject, cases = answers.subject, answers.subject.cases
    requests = [cases.several, *cases.sharing]
    engine = subject.scripted_engine()
    cold = engine.run(requests)
    comparison = answers.compare(
        "cold, together", cold, [answers.reused(request) for request in requests]
    )
    runs = {
        "warm, in another order": engine.run(requests[::-1])[::-1],
        "alone, cold": _alone(engine, requests),
        "in chunks of 37": subject.scripted_engine(max_num_batched_tokens=37, max_num_seqs=8).run(
            requests
        ),
        "no prefix caching": subject.scripted_engine(prefix_caching=False).run(requests),
    }
    if subject.device.type == "cuda":
        runs["without CUDA graphs"] = subject.scripted_engine(cuda_graphs=False).run(requests)
    return [
        comparison.finding(),
        *(comparison.against(label, torch.cat(run)) for label, run in runs.items()),
    ]


def _alone(engine: ScriptedEngine, requests: Sequence[ScriptedRequest]) -> list[Tensor]:
    logits = []
    for request in requests:
        engine.engine.store.evict_idle()
        logits += engine.run([request])
    return logits
