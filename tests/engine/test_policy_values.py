"""What a policy, an index or a server is told in numbers: of the right kind, or a sentence."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from looseleaf.config import Fuse, IndexConfig, Revise, Select, ServerConfig
from looseleaf.errors import InvalidOption

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: Fuse("links", ratio="a"), "ratio must be a number, not 'a'"),  # type: ignore[arg-type]
    (lambda: Fuse("links", ratio=True), "ratio must be a number, not True"),
    (lambda: Fuse("links", tokens=1.5), "tokens must be a whole number"),  # type: ignore[arg-type]
    (lambda: Fuse("links", seconds=math.inf), "seconds must be a finite number"),
    (lambda: Fuse("deviation", threshold=math.nan), "threshold must be a finite number"),
    (lambda: Fuse("deviation", check_layers=2), "check_layers must be a tuple"),  # type: ignore[arg-type]
    (
        lambda: Fuse("deviation", check_layers=(1.5,)),  # type: ignore[arg-type]
        "each of check_layers must be a whole number, not 1.5",
    ),
    (lambda: Fuse("ape", scale=1e300), "must be from 0.001 to 100, not 1e"),
    (lambda: Fuse("ape", temperature=1e-300), "must be from 0.001 to 100, not 1e"),
    (lambda: Select("quest", tokens=1.5), "tokens must be a whole number"),  # type: ignore[arg-type]
    (lambda: Select("quest", sink="a"), "sink must be a whole number"),  # type: ignore[arg-type]
    (lambda: Select("quest", dense_layers=3), "dense_layers must be a tuple"),  # type: ignore[arg-type]
    (lambda: Select("quest", layer_budgets=("a",)), "each of layer_budgets must be a number"),  # type: ignore[arg-type]
    (lambda: Revise(2.5), "window must be a whole number"),  # type: ignore[arg-type]
    (lambda: Revise(2, adaptive="no"), "adaptive must be True or False"),  # type: ignore[arg-type]
    (lambda: IndexConfig("flat", sink=1.5), "sink must be a whole number"),  # type: ignore[arg-type]
    (lambda: ServerConfig(max_body_mib=math.inf), "max_body_mib must be a finite number"),
    (lambda: ServerConfig(drain_seconds=math.inf), "drain_seconds must be a finite number"),
    (lambda: ServerConfig(deadline=math.inf), "deadline must be a finite number"),
    (lambda: ServerConfig(port="80"), "port must be a whole number"),  # type: ignore[arg-type]
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("make", "sentence"), WRONG)
def test_a_value_of_a_wrong_kind_is_refused(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(InvalidOption, match=sentence):
        make()


@pytest.mark.usefixtures("unchecked")
def test_a_list_is_taken_as_a_tuple() -> None:
    assert Fuse("deviation", check_layers=[1, 2]) == Fuse("deviation", check_layers=(1, 2))  # type: ignore[arg-type]
    assert hash(Select("quest", dense_layers=[0])) == hash(Select("quest", dense_layers=(0,)))  # type: ignore[arg-type]
