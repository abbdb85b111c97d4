"""Laws 2 to 6 in whole answers: the engine's logits against dense passes of the model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from looseleaf.config import EVICTING, Fuse, Revise, Select, SelectPolicy
from looseleaf.errors import InvalidRequest
from looseleaf_lab.conformance.definition import SHIFTS, HeadStates, wider
from looseleaf_lab.conformance.subject import Answering, Asked, Subject
from looseleaf_lab.conformance.verdict import Finding, Judged, largest


@dataclass(frozen=True)
class Expected:
    """What is true of some answers, and samples of what plain passes say, ``[script, vocab]``."""

    truth: Tensor
    plain: Tensor


class Answers:
    """A subject with the dense passes over its cases, each done once."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.reused = cache(self._reused)
        self.full = cache(self._full)

    def _reused(self, asked: Asked) -> Expected:
        """Documents as they are stored."""
        readings = self.subject.definition.reused(asked.parts, len(asked.script) - 1)
        return self._expected(asked, readings)

    def _full(self, asked: Asked) -> Expected:
        """Every token sees all before it."""
        return self._expected(asked, self.subject.definition.full(asked.tokens))

    def blended(self, asked: Asked, chosen: Sequence[int]) -> Expected:
        """The tokens at ``chosen`` are computed again, in their place; text and they see fresh keys
        and values of one another, stored ones of the rest."""
        definition, tokens = self.subject.definition, asked.tokens
        stored_readings = definition.reused(asked.parts, len(asked.script) - 1)
        text = stored_readings[-1].rows
        again = torch.tensor([*chosen], dtype=torch.int64, device=text.device)
        rows = torch.cat([text, again]).unique()
        every = torch.arange(len(tokens), device=text.device)
        index = torch.arange(len(rows), device=text.device)
        reading = type(stored_readings[-1])(index, every, rows, every)

        def logits(dtype: torch.dtype, shift: int) -> Tensor:
            stored = HeadStates()
            definition.hidden(tokens, stored_readings, dtype, shift=shift, keep=stored)
            hidden = definition.hidden(
                tokens, [reading], dtype, shift=shift, stored=stored, rows=rows
            )
            return definition.logits(hidden[-len(asked.script) :])

        return self._samples(logits)

    def judge(self, what: str, answers: Sequence[Tensor], expected: Sequence[Expected]) -> Judged:
        """Answers to several requests as one comparison."""
        truth = torch.cat([one.truth for one in expected])
        plain = torch.cat([one.plain for one in expected], 1)
        return Judged(what, torch.cat([*answers]), truth, plain, self.subject.dtype)

    def _expected(self, asked: Asked, readings: Any) -> Expected:
        definition = self.subject.definition

        def logits(dtype: torch.dtype, shift: int) -> Tensor:
            hidden = definition.hidden(asked.tokens, readings, dtype, shift=shift)
            return definition.logits(hidden[-len(asked.script) :])

        return self._samples(logits)

    def _samples(self, logits: Any) -> Expected:
        dtype = self.subject.dtype
        plain = torch.stack([logits(dtype, shift).float() for shift in SHIFTS])
        return Expected(logits(wider(dtype), 0), plain)


def answers_at_offsets(answers: Answers) -> list[Finding]:
    """Law 2: a document behind its lead is part of the prompt; several stand at their offsets, as
    computed for this request, and as found behind another."""
    subject, cases = answers.subject, answers.subject.cases
    (exact,) = subject.answering().ask([cases.exact])
    warm = subject.answering()
    (cold,) = warm.ask([cases.several])
    warm.ask(cases.others[:2])
    (found,) = warm.ask([cases.several])
    full, reused = answers.full(cases.exact), answers.reused(cases.several)
    return [
        answers.judge("an exact document against full attention", [exact], [full]).finding(),
        answers.judge("documents at their offsets, computed", [cold], [reused]).finding(),
        answers.judge("the same, found in the cache", [found], [reused]).finding(),
    ]


def sharing_of_answers(answers: Answers) -> tuple[list[Finding], bool]:
    """Law 3: requests that share documents at other offsets, grouped and not."""
    subject, cases = answers.subject, answers.subject.cases
    asked = [cases.several, *cases.others]
    grouped, ungrouped = subject.answering(), subject.answering(grouping=False)
    together, alone = grouped.ask(asked), ungrouped.ask(asked)
    judged = answers.judge(
        f"{len(asked)} answers, grouped", together, [answers.reused(one) for one in asked]
    )
    between = judged.against("the same, ungrouped against grouped", torch.cat(alone))
    return [judged.finding(), between], grouped.grouped_rows > 0


def blending(answers: Answers) -> list[Finding]:
    """Law 4: everything computed again, nothing, and some."""
    subject, cases = answers.subject, answers.subject.cases
    asked, engine = cases.several, subject.answering()

    def fused(fuse: Fuse | None) -> tuple[Tensor, list[int]]:
        one = Asked(asked.parts, asked.script, fuse)
        ((logits, progress),) = engine.watch([one])
        fusion = progress.outputs[0].sequence.fusion
        return logits, fusion.chosen_positions if fusion else []

    full, reused = answers.full(asked), answers.reused(asked)
    plain, _ = fused(None)
    all_again = answers.judge("ratio 1 against full prefill", [fused(Fuse("all"))[0]], [full])
    none_again = answers.judge("ratio 0 against the definition", [plain], [reused])
    zero = none_again.against("against plain reuse", fused(Fuse("random", ratio=0.0))[0])
    found = [all_again.finding(), none_again.finding(), zero]
    for fuse in (Fuse("random", ratio=0.3), Fuse("links", ratio=0.15)):
        logits, chosen = fused(fuse)
        told = f"{fuse}, rows see nothing later"
        found.append(answers.judge(told, [logits], [answers.blended(asked, chosen)]).finding())
    return found


def selection(answers: Answers) -> list[Finding]:
    """Law 5: whole answers with a full budget, and revision of a single row."""
    subject, cases = answers.subject, answers.subject.cases
    asked, engine = cases.several, subject.answering()
    everything = Select("quest", ratio=1.0, dense_layers=(), dense_below=0)
    (full,) = engine.ask([replace(asked, select=everything, revise=Revise(3))])
    judged = answers.judge(
        "answers with a full budget and a window of 3", [full], [answers.reused(asked)]
    )
    some = Select("quest", tokens=3 * subject.page_size + 16, dense_layers=(), dense_below=0)
    (base,) = engine.ask([replace(asked, select=some)])
    (alone,) = engine.ask([replace(asked, select=some, revise=Revise(1))])
    bits = largest(alone.double() - base.double())
    return [
        judged.finding(),
        Finding("answers with a small budget, window 1 against none, to the bit", bits, 0.0),
        *(_keeping_everything(answers, policy) for policy in EVICTING),
        _retrieving_everything(answers),
    ]


def _keeping_everything(answers: Answers, policy: SelectPolicy) -> Finding:
    """A policy that throws keys away, with room for all of them."""
    subject, asked = answers.subject, answers.subject.cases.plain
    told = f"an answer by {policy} with room for all keys"
    select = Select(policy, tokens=subject.tokens)
    try:
        found = subject.answering().ask([replace(asked, select=select)])
    except InvalidRequest:
        return _refused(policy)
    return answers.judge(told, found, [answers.reused(asked)]).finding()


def _retrieving_everything(answers: Answers) -> Finding:
    """A document in the host's memory, of which every key is retrieved."""
    subject, cases = answers.subject, answers.subject.cases
    engine, asked = (
        subject.answering(),
        cases.asked(cases.lead, 0, cases.between, 1, cases.question),
    )
    try:
        engine.host(asked, 1)
        found = engine.ask([replace(asked, select=Select("retrieval", ratio=1.0))])
    except InvalidRequest:
        return _refused("retrieval")
    judged = answers.judge("an answer that retrieves every key", found, [answers.reused(asked)])
    return judged.finding()


def _refused(policy: SelectPolicy) -> Finding:
    """What a model can't be asked for can't be wrong."""
    return Finding(f"{policy} is refused here", 0.0, 0.0)


def independence(answers: Answers) -> list[Finding]:
    """Law 6: the same answers cold, warm, alone, in small chunks, without prefix caching."""
    subject, cases = answers.subject, answers.subject.cases
    asked = [cases.several, *cases.others]
    engine = subject.answering()
    cold = engine.ask(asked)
    judged = answers.judge("cold, together", cold, [answers.reused(one) for one in asked])
    runs = {
        "warm, in another order": engine.ask(asked[::-1])[::-1],
        "alone, cold": _alone(engine, asked),
        "in chunks of 37": subject.answering(max_num_batched_tokens=37, max_num_seqs=8).ask(asked),
        "no prefix caching": subject.answering(prefix_caching=False).ask(asked),
    }
    if subject.device.type == "cuda":
        runs["without CUDA graphs"] = subject.answering(cuda_graphs=False).ask(asked)
    return [
        judged.finding(),
        *(judged.against(what, torch.cat(run)) for what, run in runs.items()),
    ]


def _alone(engine: Answering, asked: Sequence[Asked]) -> list[Tensor]:
    found = []
    for one in asked:
        engine.engine.store.evict_idle()
        found += engine.ask([one])
    return found
