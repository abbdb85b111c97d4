"""Projection of query-key hits onto key-key edges (RoarGraph), in C with a NumPy fallback."""

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

    The candidates of a key are the hits in ``lists`` of its ``readers``. The key selects up to
    ``degree`` of them, nearest first, without candidates nearer to a selected one; the nearest
    rejected ones fill the rest. Then reverse edges are added while there is room: first those of
    keys with the largest ``favour``, then of lower ids. Nearness is the inner product. C runs on
    ``threads`` threads, by default PyTorch's number."""
    lists, readers = lists.contiguous(), readers.contiguous()
    order = favour.argsort(descending=True, stable=True).to(torch.int32)
    # huge pages, because searches read links in random order
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
    """Entry points from which a search reaches every key with edges, at most 64.

    The first is the key that is most often the nearest of all (``firsts`` counts this); further
    ones are chosen likewise in each part of the graph that is not reachable yet."""
    library = try_native(keys, "project.c")
    if library is None:
        return torch.tensor(_entries_numpy(links.numpy(), firsts.numpy()), dtype=torch.int32)
    entries = torch.empty(_MOST_ENTRIES, dtype=torch.int32)
    # keys with edges count a little, so that parts without a nearest key have entries too
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
    """The keys reachable from ``entries``, in breadth-first order, beginning with ``entries``."""
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
    visited = np.zeros(len(table), dtype=bool)
    levels = [entries.astype(np.int32)]
    visited[entries] = True
    while len(levels[-1]):
        neighbours = table[levels[-1]].ravel()
        neighbours = neighbours[neighbours >= 0]
        neighbours = neighbours[np.sort(np.unique(neighbours, return_index=True)[1])]
        levels.append(neighbours[~visited[neighbours]])
        visited[levels[-1]] = True
    return np.concatenate(levels)


def _entries_numpy(table: Table, firsts: np.ndarray) -> list[int]:
    connected = np.asarray((table >= 0).any(1))
    unreached, counts = connected.copy(), 2 * firsts + connected
    entries: list[int] = []
    while len(entries) < _MOST_ENTRIES:
        entry = int(np.where(unreached, counts, -1).argmax() if entries else counts.argmax())
        if entries and not unreached[entry]:
            break
        entries.append(entry)
        frontier = np.array([entry])
        unreached[entry] = False
        while len(frontier):
            neighbours = table[frontier].ravel()
            neighbours = np.unique(neighbours[neighbours >= 0])
            frontier = neighbours[unreached[neighbours]]
            unreached[frontier] = False
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
        by_score = np.lexsort((candidates, -scores))
        edges = _prune(vectors[candidates[by_score]], scores[by_score], degree)
        links[key, : len(edges)] = candidates[by_score][edges]
    forward = (links >= 0).sum(1)
    count = forward.copy()
    for key in order:
        for target in links[key, : forward[key]]:
            if count[target] < links.shape[1] and key not in links[target, : count[target]]:
                links[target, count[target]] = key
                count[target] += 1


def _prune(vectors: np.ndarray, scores: np.ndarray, degree: int) -> list[int]:
    """Indices of the candidates, nearest first, that become edges."""
    diverse: list[int] = []
    for n in range(len(scores)):
        if len(diverse) == degree:
            break
        if not diverse or float((vectors[diverse] @ vectors[n]).max()) <= scores[n]:
            diverse.append(n)
    rejected = [n for n in range(len(scores)) if n not in diverse]
    return diverse + rejected[: degree - len(diverse)]
