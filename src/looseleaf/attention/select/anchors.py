"""Anchor layers, whose choice of pages serves the layers after them (Kascade, arXiv 2512.16391)."""

from collections.abc import Container, Sequence

from looseleaf.types import ScoreRule

Anchors = tuple[int, ...] | None
"""The layers that choose pages for others; None if every layer chooses."""


def choosing_layers(
    anchors: Anchors, dense_layers: Container[int], rules: Sequence[ScoreRule]
) -> tuple[int, ...]:
    """For each layer the layer whose choice it reads: itself, or the last anchor before it.

    A choice serves layers with its own window. So a layer behind an anchor of another window takes
    an earlier anchor, and chooses by itself if there is none. Dense layers are no anchors."""
    every = range(len(rules))
    if anchors is None:
        return tuple(every)
    sources, last = [], dict[int, int]()
    for layer in every:
        window = rules[layer].window
        if layer in anchors and layer not in dense_layers:
            last[window] = layer
        reads_all = layer in dense_layers
        sources.append(layer if reads_all else last.get(window, layer))
    return tuple(sources)
