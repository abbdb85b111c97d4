"""The sweep that compares a kernel's error with its budget: heads, head dims, and items with any
number of rows, ragged, some of them empty."""

import random

from looseleaf_lab.testing.build import SceneBuilder, causal
from looseleaf_lab.testing.scene import Placement, Reading, Scene, Shape

HEADS = {"gqa-1": (4, 4), "gqa-4": (8, 2), "gqa-8": (8, 1)}
HEAD_DIMS = (64, 128, 256)


def ragged_scene(seed: int, shape: Shape, num_rows: int) -> Scene:
    """``num_rows`` rows that all read one document, some of them others too, and a tail each.

    Every third row also has a reading with bound 0: its part of a grouped item is the empty state,
    and its own item is empty.
    """
    rng, builder = random.Random(seed), SceneBuilder(seed, shape)
    first, *other_documents = builder.documents
    positions: list[int] = []
    readings: list[Reading] = []
    for row in range(num_rows):
        documents = [first, *rng.sample(other_documents, rng.randint(0, len(other_documents)))]
        placements, end = [], rng.randint(0, 9)
        for document in documents:
            placements.append(Placement(document, end))
            end += document.length
        placements.append(Placement(builder.segment(rng.randint(1, shape.longest_tail)), end))
        position = end + placements[-1].segment.length - 1
        readings += [causal(row, position, placement) for placement in placements]
        if row % 3 == 0:
            readings.append(Reading(row, Placement(rng.choice(documents), position + 1), 0))
        positions.append(position)
    return builder.scene(positions, readings)
