"""The keys of an index: a view of stored vectors, or a copy in a narrower dtype.

Indexes refer to keys by row number and store no vectors."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.config.index import IndexKeys
from looseleaf.errors import InvalidOption
from looseleaf.ops.native.host_memory import host_zeros

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(eq=False)
class KeyVectors:
    """``count`` keys: key i is row i of ``vectors``.

    ``vectors`` is ``[rows, head_dim]`` with a last stride of 1; int8 vectors have ``scales``, fp32
    ``[keys]``. ``exact`` are the original keys of a narrower copy: comparisons read the copy, hits
    are rescored by ``exact``. Spare rows after the last key let `append` write without a copy.
    """

    vectors: Tensor
    count: int
    scales: Float[Tensor, " room"] | None = None
    exact: "KeyVectors | None" = None

    @classmethod
    def create(
        cls, vectors: Float[Tensor, "keys head_dim"], dtype: IndexKeys = "stored"
    ) -> "KeyVectors":
        """Keys in ``dtype``; ``stored`` is a view of ``vectors``.

        Raises InvalidOption if a key is not finite, or exceeds the range of ``dtype``."""
        if vectors.stride(-1) != 1:
            vectors = vectors.contiguous()
        _require_finite(vectors)
        stored = cls(vectors, len(vectors))
        if dtype == "stored":
            return stored
        if dtype == "int8":
            return cls(*_quantise(vectors), exact=stored)
        cast = vectors.to(_DTYPES[dtype])
        _require_finite(cast, f" in {dtype}: use bfloat16 or float32")
        return cls(cast.contiguous(), len(cast), exact=stored)

    def __len__(self) -> int:
        return self.count

    @property
    def head_dim(self) -> int:
        return self.vectors.shape[-1]

    @property
    def source(self) -> "KeyVectors":
        """The original keys of a copy; ``self`` otherwise."""
        return self.exact or self

    @property
    def num_copied_bytes(self) -> int:
        """Bytes of the copy; 0 for a view."""
        if self.exact is None:
            return 0
        scale = 0 if self.scales is None else self.scales.element_size()
        return self.count * (self.head_dim * self.vectors.element_size() + scale)

    def gather(self, ids: Tensor | slice) -> Float[Tensor, "keys head_dim"]:
        """The keys of ``ids`` in fp32."""
        if isinstance(ids, slice):
            ids = torch.arange(self.count)[ids]
        wide = self.vectors[ids].float()
        return wide if self.scales is None else wide * self.scales[ids, None]

    def wide(self, device: torch.device) -> Float[Tensor, "keys head_dim"]:
        """All keys in fp32 on ``device``."""
        wide = self.vectors[: self.count].to(device).float()
        if self.scales is None:
            return wide
        return wide * self.scales[: self.count, None].to(device)

    def append(self, new: Float[Tensor, "keys head_dim"]) -> None:
        """Add keys after the last one. Raises InvalidOption as `create` does."""
        _require_finite(new)
        narrow, scales = (new.to(self.vectors.dtype), None)
        if self.scales is not None:
            narrow, _, scales = _quantise(new)
        _require_finite(narrow, f" in {narrow.dtype}: use bfloat16 or float32")
        if self.exact is not None:
            self.exact.append(new)
        last = self.count + len(new)
        if last > len(self.vectors):
            self.vectors = _grown(self.vectors[: self.count], last)
            if self.scales is not None:
                self.scales = _grown(self.scales[: self.count], last)
        self.vectors[self.count : last] = narrow
        if self.scales is not None and scales is not None:
            self.scales[self.count : last] = scales
        self.count = last


def _grown(tensor: Tensor, least: int) -> Tensor:
    room = tensor.new_zeros((max(least, len(tensor) * 3 // 2), *tensor.shape[1:]))
    room[: len(tensor)] = tensor
    return room


def _quantise(keys: Tensor) -> tuple[Tensor, int, Tensor]:
    scales = keys.float().abs().amax(1).clamp_min(1e-30) / 127
    narrow = host_zeros(keys.shape, torch.int8)
    narrow.copy_((keys.float() / scales[:, None]).round())
    return narrow, len(keys), scales


def _require_finite(keys: Tensor, where: str = "") -> None:
    if keys.is_floating_point() and not bool(torch.isfinite(keys).all()):
        bad = int((~torch.isfinite(keys)).any(1).nonzero()[0])
        raise InvalidOption(
            f"key {bad} is not finite{where or ': a NaN or infinity has no nearest neighbours'}"
        )
