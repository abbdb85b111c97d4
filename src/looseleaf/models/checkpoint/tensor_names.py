"""Tensor names as Transformers resolves them: with no, one or two prefixes ``model.``.

Transformers adds or removes one prefix if the model has a tensor of the resulting name.
"""

from pathlib import Path

from looseleaf.errors import CorruptCheckpoint
from looseleaf.models.checkpoint.checkpoint import same_bytes
from looseleaf.models.checkpoint.header import TensorEntry

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PREFIX, _HEAD_PREFIX = "model.", "lm_head."
_TEXT_PREFIX = "model.language_model."


def by_canonical_name(folder: Path, entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors of ``folder`` by their names in a causal language model.

    Raises CorruptCheckpoint for two tensors with one name and different bytes.
    """
    resolved: dict[str, TensorEntry] = {}
    for stored, entry in sorted(entries.items()):
        first = resolved.setdefault(_canonical(stored), entry)
        if first is not entry and not same_bytes(first, entry):
            raise CorruptCheckpoint(
                f"{folder} holds {first.name[:200]} and {entry.name[:200]}, which are one tensor "
                "of the model, with different values; delete the wrong one"
            )
    return resolved


def _canonical(name: str) -> str:
    if name.startswith(_TEXT_PREFIX):
        # the text model beside towers for images and audio
        return _PREFIX + name.removeprefix(_TEXT_PREFIX)
    if name.startswith((_PREFIX * 2, _PREFIX + _HEAD_PREFIX)):
        return name.removeprefix(_PREFIX)
    return name if name.startswith((_PREFIX, _HEAD_PREFIX)) else _PREFIX + name
