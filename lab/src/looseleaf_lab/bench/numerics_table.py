"""Errors over the whole sweep with their budgets, as rows: the figures behind the assertions of
``tests/gpu/test_numerics.py``.

    python -m looseleaf_lab.bench.numerics_table --output results/numerics.csv
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from looseleaf.ops.merge_states import merge_states
from looseleaf.ops.partial_attention import Tile, WorkList, partial_attention
from looseleaf.types import AttnState
from looseleaf_lab.bench.origin import describe_origin
from looseleaf_lab.bench.results import append_rows, show_table
from looseleaf_lab.testing.budget import error_and_budget
from looseleaf_lab.testing.lists import planned, work_list
from looseleaf_lab.testing.numerics import HEAD_DIMS, ragged_scene
from looseleaf_lab.testing.oracle import dense_attention, plain_attention
from looseleaf_lab.testing.poison import poisoned
from looseleaf_lab.testing.scene import Scene, Shape

HEADS = {"gqa-1": (8, 8), "gqa-4": (32, 8), "gqa-8": (32, 4)}
ROWS = (1, 3, 16, 33, 100, 256)
LARGE = Shape(
    device="cuda", dtype=torch.bfloat16, num_documents=4, longest_document=900, longest_tail=90
)
Row = dict[str, str | int | float]


def decoded(scene: Scene, work: WorkList) -> AttnState:
    """The merged rows of ``scene`` by ``work``, computed in poisoned memory."""
    # no patches here: kernels for planned lists have no slot positions
    with poisoned():
        states = partial_attention(
            scene.q, scene.k_pages, scene.v_pages, work, scene.rotation, scene.rule
        )
        out = torch.empty_like(scene.q)
        return merge_states(states, work.row_state_indptr, out=out)


def lists_of(scene: Scene) -> dict[str, WorkList]:
    """Lists that are grouped or not, split or not, with the portable tile and with planned ones."""
    grouped = work_list(scene)
    lists = {"grouped": grouped, "alone, cut": work_list(scene, grouped=False, pages_per_item=7)}
    tiles = {f"planned, {m} rows": planned(grouped, Tile(m, 64, 4, 2, 1)) for m in (64, 128)}
    return lists | tiles


def measure(shape: Shape, rows: int) -> Iterator[Row]:
    """One row per list of the ragged scene with ``rows`` rows."""
    scene = ragged_scene(rows, shape, rows)
    truth, plain = dense_attention(scene), plain_attention(scene)
    nonempty = truth.lse > -torch.inf
    for name, work in lists_of(scene).items():
        actual = decoded(scene, work)
        error, budget = error_and_budget(
            actual.out[nonempty], truth.out[nonempty], plain.out[..., nonempty, :], shape.dtype
        )
        lse_error, lse_budget = error_and_budget(
            actual.lse[nonempty], truth.lse[nonempty], plain.lse[..., nonempty], torch.float32
        )
        relative_error = (actual.out[nonempty].double() - truth.out[nonempty]).norm() / truth.out[
            nonempty
        ].norm()
        yield {
            "list": name,
            "error": error,
            "budget": budget,
            "share_of_budget": error / budget,
            "lse_share_of_budget": lse_error / lse_budget,
            "relative_error": float(relative_error),
            "states_are_empty_where_they_should_be": int(
                torch.equal(actual.lse == -torch.inf, ~nonempty)
            ),
        }


def sweep(device: str, groups: Sequence[str], head_dims: Sequence[int]) -> Iterator[Row]:
    """Rows of every shape of the sweep with these head groups."""
    for heads in groups:
        num_qo_heads, num_kv_heads = HEADS[heads]
        for head_dim in head_dims:
            for rows in ROWS:
                shape = replace(
                    LARGE,
                    device=device,
                    num_qo_heads=num_qo_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                )
                setting: Row = {"heads": heads, "head_dim": head_dim, "rows": rows}
                yield from (setting | figures for figures in measure(shape, rows))


def main() -> None:
    """Measure, append, and print the worst row of every list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--head-dims", nargs="+", type=int, default=list(HEAD_DIMS))
    options = parser.parse_args()
    rows = list(sweep(options.device, options.heads, options.head_dims))
    append_rows(options.output, rows, describe_origin())
    worst = [
        max((row for row in rows if row["list"] == name), key=lambda r: float(r["share_of_budget"]))
        for name in dict.fromkeys(row["list"] for row in rows)
    ]
    columns = ["list", "heads", "head_dim", "rows", "share_of_budget", "relative_error"]
    show_table(worst, f"the worst of {len(rows)} rows", columns)


if __name__ == "__main__":
    main()
