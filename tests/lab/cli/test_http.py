"""``bench http``: bad options are refused before a request, and shapes are real checkpoints."""

from pathlib import Path

import pytest

from looseleaf import LLM, SamplingParams
from looseleaf_lab.bench.checkpoints import write_random_checkpoint
from tests.cli.conftest import Run


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "give a URL or --self SHAPE"),
        (("http://x", "--self", "tiny"), "give a URL or --self SHAPE"),
        (("http://x", "--streams", "1,0"), "--streams is a list of positive numbers"),
        (("http://x", "--rate", "0"), "--rate must be positive"),
        (("ftp://x",), "is no http or https URL"),
    ],
)
def test_bad_options_get_a_sentence(run: Run, options: tuple[str, ...], sentence: str) -> None:
    result = run("bench", "http", *options)
    assert result.code != 0
    assert sentence in result.err


def test_the_tiny_shape_is_a_checkpoint_that_loads(tmp_path: Path) -> None:
    llm = LLM(str(write_random_checkpoint("tiny", tmp_path / "tiny")), device="cpu", num_pages=16)
    (output,) = llm.generate(["Hello"], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2
