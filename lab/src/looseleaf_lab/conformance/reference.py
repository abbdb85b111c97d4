"""Law 8: the engine's logits against Hugging Face Transformers on the same checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from looseleaf_lab.conformance.definition import SHIFTS, wider
from looseleaf_lab.conformance.subject import ScriptedRequest, Subject
from looseleaf_lab.conformance.verdict import Comparison, Finding

# RoPE laws whose frequencies depend on the length of the sequence, so positions can't be shifted
_LENGTH_DEPENDENT = frozenset(("dynamic", "longrope"))


def available() -> bool:
    """Whether Transformers is installed."""
    return find_spec("transformers") is not None


def agrees_with_transformers(subject: Subject) -> list[Finding]:
    """Whole and chunked prefill, decode, and an exact document, all at full length."""
    cases = subject.cases
    # a length-dependent law is fixed at the subject's length, so all prompts have that length
    requests = [cases.text_only, cases.document_at_full_length]
    whole = subject.scripted_engine().run(requests)
    chunked = subject.scripted_engine(max_num_batched_tokens=37, max_num_seqs=8).run(requests)
    dtype = subject.dtype
    laws = {rope.law for rope in subject.loaded.shape.ropes}
    shifts = (0,) if laws & _LENGTH_DEPENDENT else SHIFTS
    with _reference(subject, wider(dtype)) as model:
        truth = torch.cat([_logits(model, request, 0) for request in requests])
    with _reference(subject, dtype) as model:
        plain = [torch.cat([_logits(model, request, s) for request in requests]) for s in shifts]
    label = "text, and a document behind its lead"
    whole_prompt = Comparison(
        f"{label}: prefill and decoding", torch.cat(whole), truth, torch.stack(plain), dtype
    )
    in_chunks = replace(whole_prompt, label="in chunks", actual=torch.cat(chunked))
    return [whole_prompt.finding(), in_chunks.finding()]


@contextmanager
def _reference(subject: Subject, dtype: torch.dtype) -> Iterator[Any]:
    """The model by Transformers, in ``dtype`` on the subject's device, with its messages off."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # other implementations of experts have no fp64
        mixture = subject.loaded.shape.experts is not None
        options = {"experts_implementation": "eager"} if mixture else {}
        model = AutoModelForCausalLM.from_pretrained(
            subject.loaded.folder, dtype=dtype, attn_implementation="eager", **options
        )
        yield model.to(subject.device).eval()
        del model
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
    if subject.device.type == "cuda":
        torch.cuda.empty_cache()


@torch.inference_mode()
def _logits(model: Any, request: ScriptedRequest, shift: int) -> Tensor:
    # the script's last token gives the sequence the length at which a RoPE law is fixed
    ids = torch.tensor([[*request.tokens, request.script[-1]]], device=model.device)
    positions = torch.arange(ids.shape[1], device=model.device)[None] + shift
    logits: Tensor = model(ids, position_ids=positions).logits[0, -len(request.script) - 1 : -1]
    return logits if logits.dtype == torch.float64 else logits.float()
