"""Costs of attention measured on the card are of the size of the built-in ones."""

import time

import pytest
import torch

from looseleaf import LLM, SamplingParams
from looseleaf.attention.plan.calibration import Shape, costs_of
from looseleaf.attention.plan.cost_model import cost_model_of
from looseleaf.attention.plan.probe import DeviceProbe
from looseleaf.ops.page_dtypes import FP8
from tests.checkpoints import make_checkpoint
from tests.gpu.test_engine import PROMPTS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"), [(128, torch.bfloat16), (64, torch.bfloat16), (256, None), (128, FP8)]
)
def test_costs_are_measured_in_seconds_and_are_plausible(head_dim, kv_dtype, tmp_path):
    device = torch.device("cuda")
    shape = Shape(32, 8, head_dim, 16, torch.bfloat16, kv_dtype or torch.bfloat16)
    start = time.perf_counter()
    found = costs_of(device, shape, make_probe=DeviceProbe, folder=tmp_path)
    taken = time.perf_counter() - start
    built_in = cost_model_of(device, head_dim, shape.kv_dtype.itemsize)
    print(f"\n{shape}: {taken:.2f} s, {found}\nbuilt in: {built_in}")
    assert found.source == "measured", found.reason
    # compiling other tiles is most of it
    assert taken < 120


def test_measured_costs_are_found_again_and_change_no_token(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_checkpoint(tmp_path, "llama")
    params = [SamplingParams(max_tokens=20, seed=n, ignore_eos=True) for n in range(len(PROMPTS))]
    answers = []
    for attention_costs in ("built-in", "measured", "measured"):
        options = {"device": "cuda", "dtype": "float32", "attention_costs": attention_costs}
        llm = LLM(folder, num_pages=128, **options)
        answers.append([output.token_ids for output in llm.generate(PROMPTS, params)])
    assert answers[0] == answers[1] == answers[2]
    assert len([*(tmp_path / "cache" / "looseleaf" / "costs").iterdir()]) == 1
