"""Law 8: the engine's logits against those of Hugging Face Transformers on the same checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from looseleaf_lab.conformance.definition import SHIFTS, wider
from looseleaf_lab.conformance.subject import Asked, Subject
from looseleaf_lab.conformance.verdict import Finding, Judged

# these turn by other frequencies when the sequence is longer, so it may not be moved
_LENGTH_DEPENDENT = frozenset(("dynamic", "longrope"))


def available() -> bool:
    """Whether Transformers is installed."""
    return find_spec("transformers") is not None


def agrees_with_transformers(subject: Subject) -> list[Finding]:
    """Prefill in one piece and in chunks, decoding, and an exact document, all at full length."""
    cases = subject.cases
    # a law that depends on the length is frozen at it: every prompt must have the same
    asked = [cases.plain, cases.exact_at_full_length]
    whole = subject.answering().ask(asked)
    chunked = subject.answering(max_num_batched_tokens=37, max_num_seqs=8).ask(asked)
    dtype = subject.dtype
    laws = {rope.law for rope in subject.loaded.shape.ropes}
    shifts = (0,) if laws & _LENGTH_DEPENDENT else SHIFTS
    with _reference(subject, wider(dtype)) as model:
        truth = torch.cat([_logits(model, one, 0) for one in asked])
    with _reference(subject, dtype) as model:
        plain = [torch.cat([_logits(model, one, s) for one in asked]) for s in shifts]
    told = "text, and a document behind its lead"
    judged = Judged(
        f"{told}: prefill and decoding", torch.cat(whole), truth, torch.stack(plain), dtype
    )
    in_chunks = replace(judged, what="in chunks", actual=torch.cat(chunked))
    return [judged.finding(), in_chunks.finding()]


@contextmanager
def _reference(subject: Subject, dtype: torch.dtype) -> Iterator[Any]:
    """The model by Transformers, in ``dtype`` on the subject's device, without its messages."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    was, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            subject.loaded.folder, dtype=dtype, attn_implementation="eager"
        )
        yield model.to(subject.device).eval()
        del model
    finally:
        logging.set_verbosity(was)
        if bar:
            logging.enable_progress_bar()
    if subject.device.type == "cuda":
        torch.cuda.empty_cache()


@torch.inference_mode()
def _logits(model: Any, asked: Asked, shift: int) -> Tensor:
    # with the last token of the script, though nothing is asked behind it: a law that depends on
    # the length is frozen at that of prompt and answer together
    ids = torch.tensor([[*asked.tokens, asked.script[-1]]], device=model.device)
    places = torch.arange(ids.shape[1], device=model.device)[None] + shift
    logits: Tensor = model(ids, position_ids=places).logits[0, -len(asked.script) - 1 : -1]
    return logits if logits.dtype == torch.float64 else logits.float()
