"""Batched searches in many indexes, and the attention over their hits.

One C call runs the whole batch and releases Python's lock. Without a C compiler PyTorch searches
query by query, with equal results."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from looseleaf.errors import InvalidOption
from looseleaf.index.base import FlatIndex, Hits, KVIndex, require_queries
from looseleaf.index.codes import quantise_queries, unpack
from looseleaf.index.graph import GraphIndex
from looseleaf.index.ivf import IvfIndex
from looseleaf.index.keys import KeyVectors
from looseleaf.index.native import KeysPointer, try_native
from looseleaf.types import AttnState

# candidates of a graph expanded per iteration, as in walk.h
_BEAM = 2
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
    """The C struct of an index. The caller keeps the index alive."""

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
        """The present state of the index."""
        pointer = cls(keys=KeysPointer.of(index.keys), built=index.built)
        if isinstance(index, GraphIndex):
            pointer.order, pointer.links = index.order.data_ptr(), index.links.data_ptr()
            pointer.codes, pointer.steps = index.codes.data_ptr(), index.steps.data_ptr()
            pointer.vertices, pointer.degree = index.links.shape
            pointer.entries = index.num_entries
        elif isinstance(index, IvfIndex):
            pointer.means, pointer.clusters = index.means.data_ptr(), len(index.means)
            pointer.starts, pointer.members = index.starts.data_ptr(), index.members.data_ptr()
        return pointer


def search(
    index: KVIndex,
    queries: Float[Tensor, "queries head_dim"],
    count: int,
    effort: int | None = None,
) -> Hits:
    """The (approximately) ``count`` best keys of each query; see `search_each`."""
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
    """Search query i in ``indexes[i]`` for its ``count`` (or ``count[i]``) best keys.

    ``values[i]``, the values of the keys of query i, add the attention over its hits: ``out`` fp32
    ``[queries, 1, head_dim]`` and ``lse`` ``[queries, 1]``; without ``values`` it is None. All keys
    have the same dim and dtype. ``effort``, one number or one per query, is the number of opened
    clusters (at least one) or of expanded graph vertices; the default is that of each index.
    Raises InvalidOption for a ``count`` below 1, a negative ``effort``, lists of other lengths than
    ``queries``, values of another shape or dtype than the keys, and non-finite queries."""
    if len(indexes) != len(queries):
        raise InvalidOption(f"{len(queries)} queries in {len(indexes)} indexes: give one to each")
    counts = _per_search("count", count, len(indexes))
    if min(counts, default=1) < 1:
        raise InvalidOption(f"a search is for at least one key, not {min(counts)}")
    if not indexes:
        empty = torch.empty(0, 0)
        return Hits(empty.int(), empty, torch.empty(0, dtype=torch.int64)), None
    wide = require_queries(queries, indexes[0].keys.head_dim)
    library = try_native(indexes[0].keys)
    efforts = [index.effort for index in indexes]
    if effort is not None:
        efforts = _per_search("effort", effort, len(indexes))
        if min(efforts) < 0:
            raise InvalidOption(f"the effort of a search is at least 0, not {min(efforts)}")
    if library is None:
        return _search_torch(indexes, wide, counts, efforts, values, softmax_scale)
    forms = {(i.keys.vectors.dtype, i.keys.source.vectors.dtype, i.keys.head_dim) for i in indexes}
    if len(forms) > 1:
        raise InvalidOption(f"one call searches keys of one dtype and dim, not {forms}")
    return _search_native(library, indexes, wide, counts, efforts, threads, values, softmax_scale)


def _per_search(name: str, value: int | Sequence[int], num: int) -> list[int]:
    values = [value] * num if isinstance(value, int) else list(value)
    if len(values) != num:
        raise InvalidOption(f"{len(values)} numbers as {name} of {num} searches: give one to each")
    return values


def _search_native(
    library: ctypes.CDLL,
    indexes: Sequence[KVIndex],
    queries: Tensor,
    counts: Sequence[int],
    efforts: Sequence[int],
    threads: int,
    values: Sequence[KeyVectors] | None,
    softmax_scale: float,
) -> tuple[Hits, AttnState | None]:
    num, dim, most = len(queries), queries.shape[1], max(counts)
    index_pointers = {id(index): IndexPointer.of(index) for index in indexes}
    hits = Hits(
        torch.full((num, most), -1, dtype=torch.int32),
        torch.full((num, most), -torch.inf),
        torch.empty(num, dtype=torch.int64),
    )
    searches = np.zeros(num, dtype=_SEARCH)
    searches["index"] = [ctypes.addressof(index_pointers[id(index)]) for index in indexes]
    searches["query"] = _row_addresses(queries)
    searches["want"], searches["effort"] = counts, efforts
    for name, tensor in zip(("ids", "scores", "scanned"), hits, strict=True):
        searches[name] = _row_addresses(tensor)
    state = None
    if values is not None:
        _require_values(indexes, values)
        value_pointers = {id(v): KeysPointer.of(v) for v in values}
        state = AttnState(torch.empty(num, 1, dim), torch.empty(num, 1))
        searches["values"] = [ctypes.addressof(value_pointers[id(v)]) for v in values]
        searches["scale"] = softmax_scale
        searches["out"], searches["lse"] = map(_row_addresses, state)
    library.looseleaf_search(
        ctypes.c_void_p(searches.ctypes.data), ctypes.c_int64(num), ctypes.c_int64(threads)
    )
    return hits, state


def _row_addresses(tensor: Tensor) -> np.ndarray:
    step = tensor.stride(0) * tensor.element_size()
    return np.uintp(tensor.data_ptr()) + np.arange(len(tensor), dtype=np.uintp) * np.uintp(step)


def _require_values(indexes: Sequence[KVIndex], values: Sequence[KeyVectors]) -> None:
    if len(values) != len(indexes):
        raise InvalidOption(f"values of {len(values)} for {len(indexes)} searches: give one each")
    for index, of_keys in zip(indexes, values, strict=True):
        key_form = index.keys.source.vectors.dtype, index.keys.head_dim
        value_form = of_keys.vectors.dtype, of_keys.head_dim
        if len(of_keys) < len(index.keys) or value_form != key_form:
            raise InvalidOption(
                f"{len(index.keys)} keys of {key_form[0]} and {key_form[1]} dims need equally many "
                f"values of that form, not {len(of_keys)} of {value_form[0]} and {value_form[1]} "
                "dims"
            )


def _search_torch(
    indexes: Sequence[KVIndex],
    queries: Tensor,
    counts: Sequence[int],
    efforts: Sequence[int],
    values: Sequence[KeyVectors] | None,
    softmax_scale: float,
) -> tuple[Hits, AttnState | None]:
    results = list(map(_search_one, indexes, queries, counts, efforts))
    pad = torch.nn.utils.rnn.pad_sequence
    hits = Hits(
        pad([ids for ids, _, _ in results], batch_first=True, padding_value=-1),
        pad([scores for _, scores, _ in results], batch_first=True, padding_value=-torch.inf),
        torch.tensor([scanned for _, _, scanned in results]),
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
        nearest = (index.means @ query).topk(min(max(1, effort), len(index.means))).indices
        members = [index.members[index.starts[c] : index.starts[c + 1]] for c in nearest.tolist()]
        candidates = torch.cat(members).long()
        scanned = len(index.means) + len(candidates)
    elif isinstance(index, GraphIndex) and built:
        candidates, scanned = _walk(index, query, max(effort, (count + 1) // 2), count)
    new = torch.arange(built, len(keys))
    # a walk rescores its candidates by the exact keys
    rescored = keys.source if isinstance(index, GraphIndex) else keys
    scores = torch.cat((rescored.gather(candidates) @ query, keys.gather(new) @ query))
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
    """Best-first search by codes: expands the best candidates until the best ``effort`` are.

    Returns the best ``count + 3/4 effort`` keys and the number of compared vertices."""
    weights = quantise_queries(query[None], index.steps)[0]
    visits = torch.arange(index.num_entries)
    visited = torch.zeros(len(index.order), dtype=torch.bool)
    scores, expanded = torch.empty(0, dtype=torch.int32), torch.zeros_like(visited)
    while True:
        visited[visits] = True
        fresh = visits[len(scores) :]
        new = (unpack(index.codes[fresh], len(weights)) * weights).sum(1, dtype=torch.int32)
        scores = torch.cat((scores, new))
        best = visits[np.lexsort((visits.numpy(), -scores.numpy()))[:effort].copy()]
        frontier = best[~expanded[best]][:_BEAM]
        if len(frontier) == 0:
            break
        expanded[frontier] = True
        links = index.links[frontier].long().flatten()
        links = links[links >= 0].unique()
        visits = torch.cat((visits, links[~visited[links]]))
    num = min(len(visits), count + effort * 3 // 4)
    least = scores.sort(descending=True).values[num - 1] if num else 0
    return index.order[visits[scores >= least]].long(), len(visits)
