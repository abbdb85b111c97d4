"""From what queries found to edges between keys: in C where there is a compiler, else in NumPy."""

import ctypes

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from looseleaf.index.keys import KeyVectors
from looseleaf.index.native import KeysPointer, try_native
from looseleaf.ops.native.host_memory import host_zeros

Table = np.ndarray[tuple[int, int], np.dtype[np.int32]]
_MOST_ENTRIES = 64


class _Projection(ctypes.Structure):
    _fields_ = (
        ("keys", KeysPointer),
        ("lists", ctypes.c_void_p),
        ("top", ctypes.c_int64),
        ("readers", ctypes.c_void_p),
        ("most_readers", ctypes.c_int64),
        ("order", ctypes.c_void_p),
        ("degree", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("links", ctypes.c_void_p),
    )


def project(
    keys: KeyVectors,
    lists: Int[Tensor, "queries top"],
    readers: Int[Tensor, "keys readers"],
    favour: Int[Tensor, " keys"],
    degree: int,
    width: int,
    threads: int | None = None,
) -> Int[Tensor, "keys edges"]:
    """At most ``width`` neighbours of each key, ended by -1.

    A key's candidates are what its ``readers`` found. It keeps the nearest that is not nearer to
    one kept before, up to ``degree``, and fills up with the nearest; then edges are made to go both
    ways as long as there is room, those to keys with the most ``favour`` first, then those to lower
    numbers. Nearness is the inner product. In C by ``threads`` threads, by default PyTorch's."""
    lists, readers = lists.contiguous(), readers.contiguous()
    order = favour.argsort(descending=True, stable=True).to(torch.int32)
    # searches read it at random
    links = host_zeros((len(keys), width), torch.int32).fill_(-1)
    library = try_native(keys, "project.c")
    if library is None:
        tables = (table.numpy() for table in (lists, readers, order, links))
        _project_numpy(keys, degree, *tables)
        return links
    projection = _Projection(
        KeysPointer.of(keys),
        lists.data_ptr(),
        lists.shape[1],
        readers.data_ptr(),
        readers.shape[1],
        order.data_ptr(),
        degree,
        width,
        links.data_ptr(),
    )
    library.looseleaf_project(
        ctypes.byref(projection), ctypes.c_int64(threads or torch.get_num_threads())
    )
    return links


def entries_of(
    keys: KeyVectors, links: Int[Tensor, "keys edges"], firsts: Int[Tensor, " keys"]
) -> Int[Tensor, " entries"]:
    """Where searches begin: the key that is nearest of all most often (``firsts``), then likewise
    in each part that has edges and is not reached yet, at most 64 in all."""
    library = try_native(keys, "project.c")
    if library is None:
        return torch.tensor(_entries_numpy(links.numpy(), firsts.numpy()), dtype=torch.int32)
    entries = torch.empty(_MOST_ENTRIES, dtype=torch.int32)
    # the most read first; a part without a nearest key begins anywhere
    counts = 2 * firsts.to(torch.int32) + (links[:, 0] >= 0).int()
    num = library.looseleaf_entries(
        ctypes.c_void_p(links.data_ptr()),
        ctypes.c_int64(len(links)),
        ctypes.c_int64(links.shape[1]),
        ctypes.c_void_p(counts.data_ptr()),
        ctypes.c_void_p(entries.data_ptr()),
        ctypes.c_int64(_MOST_ENTRIES),
    )
    return entries[:num].clone()


def order_of(
    keys: KeyVectors, links: Int[Tensor, "keys edges"], entries: Int[Tensor, " entries"]
) -> Int[Tensor, " reached"]:
    """The keys that are reached from ``entries``, these first, in the order of a search that looks
    behind everything: key by key and link by link."""
    links, entries = links.contiguous(), entries.contiguous()
    library = try_native(keys, "project.c")
    if library is None:
        return torch.from_numpy(_order_numpy(links.numpy(), entries.numpy()))
    order = torch.empty(len(links), dtype=torch.int32)
    num = library.looseleaf_order(
        ctypes.c_void_p(links.data_ptr()),
        ctypes.c_int64(len(links)),
        ctypes.c_int64(links.shape[1]),
        ctypes.c_void_p(entries.data_ptr()),
        ctypes.c_int64(len(entries)),
        ctypes.c_void_p(order.data_ptr()),
    )
    return host_zeros((num,), torch.int32).copy_(order[:num])


def _order_numpy(table: Table, entries: np.ndarray) -> np.ndarray:
    met = np.zeros(len(table), dtype=bool)
    parts = [entries.astype(np.int32)]
    met[entries] = True
    while len(parts[-1]):
        behind = table[parts[-1]].ravel()
        behind = behind[behind >= 0]
        behind = behind[np.sort(np.unique(behind, return_index=True)[1])]
        parts.append(behind[~met[behind]])
        met[parts[-1]] = True
    return np.concatenate(parts)


def _entries_numpy(table: Table, firsts: np.ndarray) -> list[int]:
    joined = np.asarray((table >= 0).any(1))
    waiting, counts = joined.copy(), 2 * firsts + joined
    entries: list[int] = []
    while len(entries) < _MOST_ENTRIES:
        entry = int(np.where(waiting, counts, -1).argmax() if entries else counts.argmax())
        if entries and not waiting[entry]:
            break
        entries.append(entry)
        frontier = np.array([entry])
        waiting[entry] = False
        while len(frontier):
            behind = table[frontier].ravel()
            behind = np.unique(behind[behind >= 0])
            frontier = behind[waiting[behind]]
            waiting[frontier] = False
    return entries


def _project_numpy(
    keys: KeyVectors, degree: int, lists: Table, readers: Table, order: np.ndarray, links: Table
) -> None:
    vectors = keys.gather(slice(0, None)).numpy()
    for key, queries in enumerate(readers):
        candidates = np.unique(lists[queries[queries >= 0]])
        candidates = candidates[(candidates >= 0) & (candidates != key)]
        if len(candidates) == 0:
            continue
        scores = vectors[candidates] @ vectors[key]
        nearest = np.lexsort((candidates, -scores))
        chosen = _prune(vectors[candidates[nearest]], scores[nearest], degree)
        links[key, : len(chosen)] = candidates[nearest][chosen]
    own = (links >= 0).sum(1)
    count = own.copy()
    for key in order:
        for other in links[key, : own[key]]:
            if count[other] < links.shape[1] and key not in links[other, : count[other]]:
                links[other, count[other]] = key
                count[other] += 1


def _prune(vectors: np.ndarray, scores: np.ndarray, degree: int) -> list[int]:
    """Which candidates, nearest first, become edges."""
    kept: list[int] = []
    for n in range(len(scores)):
        if len(kept) == degree:
            break
        if not kept or float((vectors[kept] @ vectors[n]).max()) <= scores[n]:
            kept.append(n)
    others = [n for n in range(len(scores)) if n not in set(kept)]
    return kept + others[: degree - len(kept)]
