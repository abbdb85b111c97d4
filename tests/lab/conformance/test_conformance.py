"""`looseleaf conformance` passes what is right, and names the law that something wrong breaks."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import config

from looseleaf.attention import cpu_step, paged
from looseleaf.attention.plan.chunks import PrefillChunk
from looseleaf.attention.plan.groups import Groups, ReadSpan
from looseleaf.attention.select.policy import Choice
from looseleaf.blend.fusion import Fusion
from looseleaf.config import RopeConfig
from looseleaf.engine.runner.runner import Runner
from looseleaf.errors import InvalidOption
from looseleaf.kv.keys import KeySpace
from looseleaf.prompt import placements as parts
from looseleaf.rope import laws as rope_laws
from looseleaf.sparse import policy as sparse_policy
from looseleaf.tiers.stores import files
from looseleaf.types import AttnState, Rotation
from looseleaf_lab.conformance import LAWS, Answers, Subject, check_laws, reference
from tests.checkpoints import FAMILIES, make_checkpoint, supports
from tests.cli.conftest import Run, run  # noqa: F401

CASES = [
    *((family, "default") for family in FAMILIES),
    *(("llama", law) for law in ("dynamic", "llama3", "yarn")),
    ("phi3", "longrope"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    root = tmp_path_factory.mktemp("conformance")

    def folder(family: str = "llama", law: str = "default") -> str:
        assert supports(family, law)
        path = root / f"{family}-{law}"
        return str(path if path.exists() else make_checkpoint(path, family, law))

    return folder


@pytest.fixture(scope="module", autouse=True)
def as_users_run_it() -> Iterator[None]:
    """Without the checks of shapes at every call, which would take most of the time here; the
    engine's own tests have them."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def failing(folder: str, may_raise: tuple[int, ...] = (), **options: Any) -> list[int]:
    """The numbers of the laws that fail on a CPU in fp32; those of ``may_raise`` may raise."""
    subject = Subject(folder, {"device": "cpu", "dtype": "float32", **options}, 160)
    found = check_laws(Answers(subject))
    assert [law.number for law in found] == [law.number for law in LAWS]
    failed = [law for law in found if law.status == "failed"]
    # a number was too large; nothing was raised
    assert not any(law.reason for law in failed if law.number not in may_raise), failed
    return [law.number for law in failed]


@pytest.mark.parametrize(("family", "law"), CASES)
def test_every_family_and_every_rope_law_conforms(
    checkpoint: Callable[..., str], family: str, law: str
) -> None:
    assert failing(checkpoint(family, law)) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_conforms_in_its_own_budget(
    checkpoint: Callable[..., str], dtype: str
) -> None:
    assert failing(checkpoint("qwen3"), dtype=dtype, page_size=32) == []


def test_products_instead_of_c_conform(checkpoint: Callable[..., str]) -> None:
    assert failing(checkpoint("mistral"), cpu_kernels="torch") == []


def average(states: AttnState, indptr: torch.Tensor, *rest: Any, **options: Any) -> AttnState:
    """A merge that forgets how much each set weighs."""
    rows = [states.out[a:b].mean(0) for a, b in pairwise(indptr)]
    return AttnState(torch.stack(rows), states.lse[indptr[:-1].long()])


def test_a_merge_that_forgets_weights_breaks_law_1(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the engine's own reading; the operator by itself is right."""
    monkeypatch.setattr(cpu_step, "merge_states", average)
    # what is not finite is no query for an index either
    found = failing(checkpoint(), may_raise=(5,), cpu_kernels="torch")
    assert found[0] == 1


def test_a_merge_operator_that_forgets_weights_breaks_law_1(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the operator by itself; the C kernels merge on their own."""
    monkeypatch.setattr("looseleaf_lab.conformance.operators.merge_states", average)
    assert failing(checkpoint(), cpu_kernels="native") == [1]


def test_rope_with_a_wrong_scaling_breaks_law_8_alone(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine and dense passes read the same wrong frequencies; Transformers does not."""

    def unscaled(config: RopeConfig) -> rope_laws.Frequencies:
        return rope_laws._default(config)

    monkeypatch.setitem(rope_laws._LAWS, "llama3", unscaled)
    assert failing(checkpoint("llama", "llama3")) == [8]


right_span = parts.DocumentUse.span


def one_off(use: parts.DocumentUse) -> ReadSpan:
    return replace(right_span(use), offset=right_span(use).offset - 1)


def test_a_frame_that_is_one_off_breaks_law_2(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.DocumentUse, "span", one_off)
    assert failing(checkpoint())[0] == 2


def test_a_group_that_is_read_from_where_its_first_row_stands_breaks_law_3(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a shared segment had one offset for all that read it."""
    right = paged.group_rows

    def one_offset(*arguments: Any, **options: Any) -> Groups:
        groups = right(*arguments, **options)
        for item in groups.items:
            first = item.entries[0].offset
            item.entries[:] = [entry._replace(offset=first) for entry in item.entries]
        return groups

    monkeypatch.setattr(paged, "group_rows", one_offset)
    subject = Subject(checkpoint(), {"device": "cpu", "dtype": "float32"}, 160)
    (law,) = check_laws(Answers(subject), (3,))
    assert (law.status, law.reason) == ("failed", "")


def test_a_recomputed_row_that_sees_the_next_key_breaks_law_4(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Fusion.prefill

    def one_later(fusion: Fusion, start: int, stop: int) -> PrefillChunk:
        chunk = right(fusion, start, stop)
        return replace(chunk, positions=[at + 1 for at in chunk.positions])

    monkeypatch.setattr(Fusion, "prefill", one_later)
    assert failing(checkpoint()) == [4]


def test_a_replaced_key_that_is_still_read_breaks_law_4(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents are read whole beside the patch that replaces some of their tokens."""
    right = Fusion.spans

    def unmasked(fusion: Fusion, replaced: Any, last: int) -> tuple[ReadSpan, ...]:
        return tuple(replace(span, hidden=None) for span in right(fusion, replaced, last))

    monkeypatch.setattr(Fusion, "spans", unmasked)
    assert failing(checkpoint()) == [4]


def test_a_rotation_table_that_is_off_breaks_law_2(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    create = Runner.create.__func__

    def off(cls: type, *arguments: Any) -> Runner:
        runner = create(cls, *arguments)
        table = runner.attention.rotations[0]
        wrong = Rotation(table.cos * 1.001, table.sin, table.interleaved)
        runner.attention.rotations = (wrong,) * len(runner.attention.rotations)
        runner.attention.__post_init__()
        return runner

    monkeypatch.setattr(Runner, "create", classmethod(off))
    assert {1, 2} < {*failing(checkpoint())}


def test_a_choice_that_leaves_a_page_out_breaks_law_5(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last page that a row chose is not read."""
    right = sparse_policy.choose_pages

    def short(*arguments: Any) -> Choice:
        choice = right(*arguments)
        return choice._replace(counts=(choice.counts - 1).clamp_min(0))

    monkeypatch.setattr(sparse_policy, "choose_pages", short)
    assert failing(checkpoint()) == [5]


def test_a_checksum_that_nobody_looks_at_breaks_law_7(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "checksum", lambda content: "00000000")
    assert failing(checkpoint()) == [7]


def test_segments_known_by_their_text_alone_break_law_6(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document that was encoded alone is taken for one that was encoded behind the lead."""
    right = KeySpace.document
    monkeypatch.setattr(
        KeySpace, "document", lambda self, context, tokens: right(self, self.root, tokens)
    )
    assert 6 in failing(checkpoint())


def test_a_law_during_whose_check_something_is_raised_has_failed(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr("looseleaf_lab.conformance.operators.merge_states", broken)
    subject = Subject(checkpoint(), {"device": "cpu", "dtype": "float32"}, 160)
    (law,) = check_laws(Answers(subject), (1,))
    assert (law.status, law.reason) == ("failed", "RuntimeError: illegal memory access")


def test_without_transformers_law_8_is_skipped_and_says_what_to_install(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "available", lambda: False)
    subject = Subject(checkpoint(), {"device": "cpu", "dtype": "float32"}, 160)
    (law,) = check_laws(Answers(subject), (8,))
    assert law.status == "skipped"
    assert "pip install" in law.reason


def test_a_length_without_room_for_documents_is_refused(checkpoint: Callable[..., str]) -> None:
    with pytest.raises(InvalidOption, match="at least 160 tokens"):
        Subject(checkpoint(), {"device": "cpu"}, 100)
    with pytest.raises(InvalidOption, match="can read"):
        Subject(checkpoint(), {"device": "cpu"}, 4096)
    assert Subject(checkpoint(), {"device": "cpu"}, 4096, exactly=False).tokens == 256


def test_the_command_prints_one_page_and_exits_with_0(
    run: Run,  # noqa: F811
    checkpoint: Callable[..., str],
) -> None:
    result = run("conformance", checkpoint(), "--dtype", "float32", "--device", "cpu")
    assert result.code == 0
    lines = result.out.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 100
    for law in LAWS:
        assert any(line.startswith(f"law {law.number}  ") for line in lines)
    assert lines[-1] == f"conforms, as far as it was checked ({len(LAWS)} passed)"


def test_the_command_names_the_law_that_fails_and_exits_with_1(
    run: Run,  # noqa: F811
    checkpoint: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("looseleaf_lab.conformance.operators.merge_states", average)
    options = ("--dtype", "float32", "--device", "cpu", "--tokens", 160)
    told = run("conformance", checkpoint(), *options, "--law", 1, "--law", 3)
    assert told.code == 1
    assert "law 1  FAILED" in told.out and "law 3  passed" in told.out
    assert told.out.splitlines()[-1] == "does not conform: law 1 failed (1 passed, 1 failed)"
    plain = run("conformance", checkpoint(), *options, "--law", 1, "--json")
    data = json.loads(plain.out)
    assert (plain.code, data["conforms"]) == (1, False)
    (law,) = data["laws"]
    assert law["status"] == "failed"
    assert [finding["holds"] for finding in law["findings"]] == [False, True]
    assert law["findings"][0]["error"] > law["findings"][0]["budget"]


def test_keys_of_eight_bits_conform_in_the_budget_of_their_rounding(
    checkpoint: Callable[..., str],
) -> None:
    assert failing(checkpoint(), kv_dtype="fp8") == []
    subject = Subject(checkpoint(), {"device": "cpu", "kv_dtype": "fp8"}, 160)
    (law,) = check_laws(Answers(subject), (8,))
    assert law.status == "skipped" and "kv_dtype" in law.reason


def test_a_wrong_frame_shows_behind_the_rounding_of_eight_bits(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.DocumentUse, "span", one_off)
    assert 2 in failing(checkpoint(), kv_dtype="fp8")


def test_an_unknown_law_is_refused(run: Run) -> None:  # noqa: F811
    assert "there is no law 9" in run("conformance", "--law", 9).sentence()
