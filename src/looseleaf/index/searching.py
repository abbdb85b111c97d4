"""Searches in many indexes at once, and the attention over what they find.

One call of C takes all of them, outside of Python's lock; without a compiler the same is done
query by query in PyTorch."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.index.base import Hits, KVIndex, require_queries
from looseleaf.index.codes import ask_codes, unpack
from looseleaf.index.flat import FlatIndex
from looseleaf.index.graph import GraphIndex
from looseleaf.index.ivf import IvfIndex
from looseleaf.index.keys import KeyVectors
from looseleaf.index.native import KeysPointer, try_native
from looseleaf.types import AttnState

# candidates of a graph that are looked behind at once, as in walk.h
_WIDE = 2
_SEARCH = np.dtype(
    [
        ("index", np.uintp),
        ("query", np.uintp),
        ("want", np.int64),
        ("effort", np.int64),
        ("ids", np.uintp),
        ("scores", np.uintp),
        ("scanned", np.uintp),
        ("values", np.uintp),
        ("scale", np.float32),
        ("out", np.uintp),
        ("lse", np.uintp),
    ],
    align=True,
)


class IndexPointer(ctypes.Structure):
    """An index as C reads it; whoever makes one keeps the index alive."""

    _fields_ = (
        ("keys", KeysPointer),
        ("built", ctypes.c_int64),
        ("order", ctypes.c_void_p),
        ("links", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("degree", ctypes.c_int64),
        ("vertices", ctypes.c_int64),
        ("entries", ctypes.c_int64),
        ("means", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("members", ctypes.c_void_p),
        ("clusters", ctypes.c_int64),
    )

    @classmethod
    def of(cls, index: KVIndex) -> "IndexPointer":
        """The index as it is now."""
        made = cls(keys=KeysPointer.of(index.keys), built=index.built)
        if isinstance(index, GraphIndex):
            made.order, made.links = index.order.data_ptr(), index.links.data_ptr()
            made.codes, made.steps = index.codes.data_ptr(), index.steps.data_ptr()
            made.vertices, made.degree = index.links.shape
            made.entries = index.num_entries
        elif isinstance(index, IvfIndex):
            made.means, made.clusters = index.means.data_ptr(), len(index.means)
            made.starts, made.members = index.starts.data_ptr(), index.members.data_ptr()
        return made


def search(
    index: KVIndex,
    queries: Float[Tensor, "queries head_dim"],
    count: int,
    effort: int | None = None,
) -> Hits:
    """The (nearly) ``count`` best keys of each query; see `search_each`."""
    return search_each([index] * len(queries), queries, count, effort=effort)[0]


def search_each(
    indexes: Sequence[KVIndex],
    queries: Float[Tensor, "queries head_dim"],
    count: int | Sequence[int],
    *,
    values: Sequence[KeyVectors] | None = None,
    softmax_scale: float = 1.0,
    effort: int | Sequence[int] | None = None,
    threads: int = 1,
) -> tuple[Hits, AttnState | None]:
    """Query i in ``indexes[i]``, for the ``count`` best keys, or the ``count[i]`` best.

    With ``values`` (for each query those of its keys) also the attention over its hits: ``out`` is
    fp32 ``[queries, 1, head_dim]`` and ``lse`` ``[queries, 1]``. All keys have one dim and dtype.
    ``effort`` is that of the search, or of each: clusters that are opened, one at least, or
    vertices of a graph that are looked behind; without one each index has its own. Raises
    InvalidOption for a ``count`` below 1 or an ``effort`` below 0, lists of another length than
    ``queries``, values that are not like the keys, and queries that are not finite."""
    if len(indexes) != len(queries):
        raise InvalidOption(f"{len(queries)} queries in {len(indexes)} indexes: give one to each")
    wanted = _one_each("count", count, len(indexes))
    if min(wanted, default=1) < 1:
        raise InvalidOption(f"a search is for at least one key, not {min(wanted)}")
    if not indexes:
        empty = torch.empty(0, 0)
        return Hits(empty.int(), empty, torch.empty(0, dtype=torch.int64)), None
    wide = require_queries(queries, indexes[0].keys.head_dim)
    library = try_native(indexes[0].keys)
    efforts = [index.effort for index in indexes]
    if effort is not None:
        efforts = _one_each("effort", effort, len(indexes))
        if min(efforts) < 0:
            raise InvalidOption(f"the effort of a search is at least 0, not {min(efforts)}")
    if library is None:
        return _search_torch(indexes, wide, (wanted, efforts), values, softmax_scale)
    same = {(i.keys.vectors.dtype, i.keys.source.vectors.dtype, i.keys.head_dim) for i in indexes}
    if len(same) > 1:
        raise InvalidOption(f"one call searches keys of one dtype and dim, not {same}")
    return _search_native(library, indexes, wide, (wanted, efforts, threads), values, softmax_scale)


def _one_each(name: str, given: int | Sequence[int], count: int) -> list[int]:
    each = [given] * count if isinstance(given, int) else list(given)
    if len(each) != count:
        raise InvalidOption(f"{len(each)} numbers as {name} of {count} searches: give one to each")
    return each


def _search_native(
    library: ctypes.CDLL,
    indexes: Sequence[KVIndex],
    queries: Tensor,
    how: tuple[Sequence[int], Sequence[int], int],
    values: Sequence[KeyVectors] | None,
    softmax_scale: float,
) -> tuple[Hits, AttnState | None]:
    (wanted, efforts, threads), num, dim = how, len(queries), queries.shape[1]
    most = max(wanted)
    made = {id(index): IndexPointer.of(index) for index in indexes}
    hits = Hits(
        torch.full((num, most), -1, dtype=torch.int32),
        torch.full((num, most), -torch.inf),
        torch.empty(num, dtype=torch.int64),
    )
    searches = np.zeros(num, dtype=_SEARCH)
    searches["index"] = [ctypes.addressof(made[id(index)]) for index in indexes]
    searches["query"] = _rows(queries)
    searches["want"], searches["effort"] = wanted, efforts
    for name, tensor in zip(("ids", "scores", "scanned"), hits, strict=True):
        searches[name] = _rows(tensor)
    state = None
    if values is not None:
        _require_values(indexes, values)
        pointers = {id(v): KeysPointer.of(v) for v in values}
        state = AttnState(torch.empty(num, 1, dim), torch.empty(num, 1))
        searches["values"] = [ctypes.addressof(pointers[id(v)]) for v in values]
        searches["scale"] = softmax_scale
        searches["out"], searches["lse"] = _rows(state.out), _rows(state.lse)
    library.looseleaf_search(
        ctypes.c_void_p(searches.ctypes.data), ctypes.c_int64(num), ctypes.c_int64(threads)
    )
    return hits, state


def _rows(tensor: Tensor) -> np.ndarray:
    step = tensor.stride(0) * tensor.element_size()
    return np.uintp(tensor.data_ptr()) + np.arange(len(tensor), dtype=np.uintp) * np.uintp(step)


def _require_values(indexes: Sequence[KVIndex], values: Sequence[KeyVectors]) -> None:
    if len(values) != len(indexes):
        raise InvalidOption(f"values of {len(values)} for {len(indexes)} searches: give one each")
    for index, of_keys in zip(indexes, values, strict=True):
        form = index.keys.source.vectors.dtype, index.keys.head_dim
        mine = of_keys.vectors.dtype, of_keys.head_dim
        if len(of_keys) < len(index.keys) or mine != form:
            raise InvalidOption(
                f"{len(index.keys)} keys of {form[0]} and {form[1]} dims need as many values like "
                f"them, not {len(of_keys)} of {mine[0]} and {mine[1]} dims"
            )


def _search_torch(
    indexes: Sequence[KVIndex],
    queries: Tensor,
    how: tuple[Sequence[int], Sequence[int]],
    values: Sequence[KeyVectors] | None,
    softmax_scale: float,
) -> tuple[Hits, AttnState | None]:
    found = [_search_one(*each) for each in zip(indexes, queries, *how, strict=True)]
    pad = torch.nn.utils.rnn.pad_sequence
    hits = Hits(
        pad([ids for ids, _, _ in found], batch_first=True, padding_value=-1),
        pad([scores for _, scores, _ in found], batch_first=True, padding_value=-torch.inf),
        torch.tensor([scanned for _, _, scanned in found]),
    )
    if values is None:
        return hits, None
    _require_values(indexes, values)
    out = torch.zeros(len(queries), 1, queries.shape[1])
    for n, of_keys in enumerate(values):
        ids = hits.ids[n][hits.ids[n] >= 0].long()
        weights = (hits.scores[n][: len(ids)] * softmax_scale).softmax(0)
        out[n, 0] = weights @ of_keys.gather(ids)
    return hits, AttnState(out, (hits.scores * softmax_scale).logsumexp(1)[:, None])


def _search_one(
    index: KVIndex, query: Tensor, count: int, effort: int
) -> tuple[Tensor, Tensor, int]:
    keys, built = index.keys, index.built
    candidates, scanned = torch.empty(0, dtype=torch.int64), 0
    if count >= len(keys) or isinstance(index, FlatIndex):
        built = 0
    elif isinstance(index, IvfIndex) and len(index.means):
        opened = (index.means @ query).topk(min(max(1, effort), len(index.means))).indices
        runs = [index.members[index.starts[c] : index.starts[c + 1]] for c in opened.tolist()]
        candidates = torch.cat(runs).long()
        scanned = len(index.means) + len(candidates)
    elif isinstance(index, GraphIndex) and built:
        candidates, scanned = _walk(index, query, max(effort, (count + 1) // 2), count)
    new = torch.arange(built, len(keys))
    # a walk judges what it found by the keys themselves
    found = keys.source if isinstance(index, GraphIndex) else keys
    scores = torch.cat((found.gather(candidates) @ query, keys.gather(new) @ query))
    candidates = torch.cat((candidates, new))
    order = np.lexsort((candidates.numpy(), -scores.numpy()))[:count].copy()
    if keys.exact is not None:
        candidates = candidates[order]
        scores = keys.exact.gather(candidates) @ query
        order = np.lexsort((candidates.numpy(), -scores.numpy()))
    ids = torch.full((count,), -1, dtype=torch.int32)
    best = torch.full((count,), -torch.inf)
    ids[: len(order)], best[: len(order)] = candidates[order].int(), scores[order]
    return ids, best, scanned + len(new)


def _walk(index: GraphIndex, query: Tensor, effort: int, count: int) -> tuple[Tensor, int]:
    """Best first by codes: always look behind the best candidates that were not looked behind yet.

    Returns the keys of the best that were met, ``count`` and three quarters of ``effort``."""
    asked = ask_codes(query[None], index.steps)[0]
    met = torch.arange(index.num_entries)
    seen = torch.zeros(len(index.order), dtype=torch.bool)
    scores, done = torch.empty(0, dtype=torch.int32), torch.zeros_like(seen)
    while True:
        seen[met] = True
        fresh = met[len(scores) :]
        new = (unpack(index.codes[fresh], len(asked)) * asked).sum(1, dtype=torch.int32)
        scores = torch.cat((scores, new))
        best = met[np.lexsort((met.numpy(), -scores.numpy()))[:effort].copy()]
        at = best[~done[best]][:_WIDE]
        if len(at) == 0:
            break
        done[at] = True
        links = index.links[at].long().flatten()
        links = links[links >= 0].unique()
        met = torch.cat((met, links[~seen[links]]))
    kept = min(len(met), count + effort * 3 // 4)
    least = scores.sort(descending=True).values[kept - 1] if kept else 0
    return index.order[met[scores >= least]].long(), len(met)
