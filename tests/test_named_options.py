"""An option out of range is refused by the name that its caller typed, with the value given."""

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any, get_origin, get_type_hints

import pytest
from jaxtyping import config

from looseleaf.cli.options import ENGINE_SECTIONS, flag
from looseleaf.config import Fuse, IndexConfig, Revise, Select, ServerConfig
from looseleaf.errors import InvalidOption
from looseleaf.sampling_params import SamplingParams
from tests.cli.conftest import Run, run

__all__ = ["run"]

SECTIONS = (*ENGINE_SECTIONS, ServerConfig, IndexConfig, Fuse, Select, Revise, SamplingParams)
# of any value
FREE = {"seed", "threshold"}
# given as one value or as any collection
COLLECTIONS = {"stop", "stop_token_ids", "logit_bias"}
BESIDE: dict[str, dict[str, Any]] = {
    **{name: {"selector": "ape"} for name in ("temperature", "scale")},
    **{name: {"selector": "links"} for name in ("watched_share", "ratio")},
    **{name: {"selector": "deviation"} for name in ("check_layers", "check_factors", "seconds")},
    **{"tokens": {"selector": "first"}, "balanced": {"selector": "first"}},
}


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Arguments of wrong types reach the library, as they do outside of tests."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def options() -> Iterator[Any]:
    for section in SECTIONS:
        for field in dataclasses.fields(section):
            nested = field.name in ("cache", "scheduler", "tiers", *FREE, *COLLECTIONS)
            untyped = section is SamplingParams and get_type_hints(section)[field.name] is bool
            if not nested and not untyped:
                yield pytest.param(section, field.name, id=f"{section.__name__}-{field.name}")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("section", "name"), list(options()))
def test_python_reads_the_keyword_and_the_value(section: type[Any], name: str) -> None:
    beside = BESIDE.get(name, {}) if section is Fuse else {}
    with pytest.raises(InvalidOption) as refused:
        section(**beside, **{name: -7.0})
    message = str(refused.value)
    assert name in message
    assert "-7" in message or name == "grammar"
    assert name in refused.value.options


@pytest.mark.parametrize(
    "given",
    [
        (Fuse, {"selector": "links", "ratio": 15.0}),
        (Select, {"ratio": 15.0}),
        (Select, {"mass": 15.0}),
        (Fuse, {"selector": "deviation", "check_layers": (15, 15)}),
        (Select, {"dense_layers": (15, 15)}),
        (Select, {"anchors": (15, 15)}),
        (Select, {"layer_budgets": (1.0, -15.0)}),
        (SamplingParams, {"logit_bias": {3: 15e9}}),
        (IndexConfig, {"span": 15}),
    ],
    ids=str,
)
def test_the_value_is_stated_as_it_was_typed(given: tuple[type[Any], dict[str, Any]]) -> None:
    section, options = given
    with pytest.raises(InvalidOption, match="15"):
        section(**options)


def flags() -> Iterator[Any]:
    for section in (*ENGINE_SECTIONS, ServerConfig):
        for name, hint in get_type_hints(section).items():
            kinds = {int, float} & {hint, *getattr(hint, "__args__", ())}
            if kinds and get_origin(hint) is not tuple and name not in FREE:
                yield pytest.param("serve" if section is ServerConfig else "ask", name, id=name)


@pytest.mark.parametrize(("command", "name"), list(flags()))
def test_the_command_line_reads_the_flag_and_the_value(run: Run, command: str, name: str) -> None:
    beside = {"disk_gib": ["--disk-path=x"]}
    beside |= {key: ["--fuse=links"] for key in ("canary_share", "canary_bound")}
    typed = [f"{flag(name)}=-7", *beside.get(name, [])]
    sentence = run(command, *(["Who?"] if command == "ask" else []), *typed).sentence()
    assert flag(name) in sentence
    assert "-7" in sentence
    assert "_" not in sentence
    assert "None" not in sentence


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--fuse links --ratio 15", "--ratio must be from 0 to 1, not 15"),
        ("--max-tokens 0", "--max-tokens must be at least 1, not 0"),
        ("--temperature -0.5", "--temperature must be 0 (greedy) or a positive number, not -0.5"),
        ("--select all --budget 9", "--select 'all' reads everything: leave out --budget"),
        ("--device abacus", "unknown --device 'abacus': use auto, cpu or cuda"),
        (
            "--max-num-seqs 9 --max-num-batched-tokens 8",
            "--max-num-batched-tokens=8 must be at least --max-num-seqs=9, or running sequences "
            "leave no room for new ones",
        ),
    ],
)
def test_policies_and_pairs_have_their_flags_too(run: Run, arguments: str, sentence: str) -> None:
    assert run("ask", "Who?", *arguments.split()).sentence() == f"looseleaf: {sentence}"


def test_a_quoted_value_keeps_its_spelling_and_options_pass_between_processes() -> None:
    error = InvalidOption("ratio must be a number, not 'ratio' or pre-ratio", "ratio")
    again = pickle.loads(pickle.dumps(error))
    for one in (error, again):
        assert one.named(flag_of) == "--ratio must be a number, not 'ratio' or pre-ratio"
        assert str(one) == "ratio must be a number, not 'ratio' or pre-ratio"


def flag_of(name: str) -> str:
    return f"--{name}"


@pytest.mark.parametrize("digits", [400, 5000])
def test_numbers_of_any_size_are_stated_in_short(digits: int) -> None:
    with pytest.raises(InvalidOption) as refused:
        Select(tokens=-(10**digits))
    assert len(str(refused.value)) < 200
