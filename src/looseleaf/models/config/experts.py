"""The fields of ``config.json`` for mixtures of experts: their number, sizes and router's law."""

from typing import Any

from looseleaf.config import ExpertConfig
from looseleaf.errors import CorruptCheckpoint, UnsupportedModel
from looseleaf.models.checkpoint.fields import Json, rows, shown, switch, whole

# names of the number of experts, by family and version
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# far above the values of real models
_MAX_EXPERTS, MAX_SHARED, MAX_GROUPS = 4096, 64, 64


def read_experts(
    raw: Json,
    *,
    num_experts: int,
    top_k: int,
    inner: int | None = None,
    normalized: bool | None = None,
    **law: Any,
) -> ExpertConfig:
    """The experts of a family with these defaults; ``inner`` None means ``intermediate_size``.

    ``normalized`` None reads ``norm_topk_prob``. ``law`` are further fields of the result. Raises
    CorruptCheckpoint."""
    name = "intermediate_size" if inner is None else "moe_intermediate_size"
    if normalized is None:
        normalized = switch(raw, "norm_topk_prob")
    return ExpertConfig(
        num_experts=_count(raw, num_experts),
        top_k=whole(raw, "num_experts_per_tok", top_k, most=_MAX_EXPERTS),
        intermediate_size=whole(raw, name, inner),
        normalized=normalized,
        dense_layers=_dense_layers(raw),
        **law,
    )


def shared_experts(raw: Json, name: str, default: int, inner: int) -> int:
    """How many experts of ``inner`` are as wide as the shared MLP. Raises UnsupportedModel."""
    width = whole(raw, name, default)
    if width % inner or width // inner > MAX_SHARED:
        raise UnsupportedModel(
            f"{name} {width} is not a multiple of the experts' {inner}, or too large: only shared "
            f"MLPs as wide as 1 to {MAX_SHARED} experts are implemented"
        )
    return width // inner


def _count(raw: Json, default: int) -> int:
    counts = {whole(raw, name, most=_MAX_EXPERTS) for name in _COUNTS if raw.get(name) is not None}
    if len(counts) > 1:
        raise CorruptCheckpoint(
            f"{' and '.join(_COUNTS)} say {shown(sorted(counts))} experts; write one number"
        )
    return counts.pop() if counts else default


def _dense_layers(raw: Json) -> tuple[int, ...]:
    """Layers with a dense MLP: the first ones, listed ones, and those between steps."""
    layers = range(whole(raw, "num_hidden_layers"))
    first = whole(raw, "first_k_dense_replace", 0, least=0)
    step = whole(raw, "decoder_sparse_step", 1)
    listed = rows(raw, "mlp_only_layers")
    return tuple(n for n in layers if n < first or n in listed or (n + 1) % step)
