"""What every test runs under: one thread per worker, Triton interpreted on CPUs, and shapes that
are checked if CHECK_SHAPES is set, which doubles the time of tests.

Everything here must happen before looseleaf or triton is imported for the first time.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
TESTS = Path(__file__).parent
GPU_TESTS = TESTS / "gpu"
# an environment of its own, `make test-clients`
collect_ignore = [str(TESTS / "clients")]
# left out by `make test`: they need more packages, or they test more than the product
REST = tuple(
    TESTS / name
    for name in (
        *("lab", "docs", "deploy", "training", "gpu", "real", "server/clients"),
        *("server/test_page.py", "server/test_fuzz.py", "server/test_tools.py"),
        "test_gpu_report.py",
        # servers as processes, which start for seconds each
        *("server/test_ending.py", "server/test_drain.py", "server/test_hosted.py"),
        *("server/test_stalled.py", "server/test_line_writer.py", "server/test_processes.py"),
        *("server/test_registering.py", "server/test_tenants.py"),
    )
)

# triton reads both when it is imported; unset, the second is a warning and so an error
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    collect_ignore.append(str(GPU_TESTS))

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# a minute's worth: `make smoke`
SMOKE = tuple(
    TESTS / name
    for name in (
        *("test_package.py", "test_readme.py", "ops/test_merge_states.py", "kv/test_pool.py"),
        *("models/test_tokenizer.py", "engine/test_chat.py", "engine/test_prompt.py"),
    )
)

# operators, plans and laws: every public tensor function is called from these
SHAPES = tuple(
    TESTS / name
    for name in (
        *("attention", "blend", "index/test_hosted_work.py", "kv", "rope", "sparse/test_laws.py"),
        *("engine/test_law_exact.py", "models/test_quantized.py", "retro/test_dense.py"),
        *("ops/test_merge_states.py", "ops/test_dispatch.py", "ops/test_prefill_attention.py"),
    )
)


def _check_shapes() -> None:
    """Have beartype check the shapes and types of every call into looseleaf, but for kernels.

    The hook would wrap ``@triton.jit`` functions too, which the compiler can't see through.
    """
    import_module("tests.typechecker")
    from jaxtyping import install_import_hook

    checked = install_import_hook(["looseleaf", "looseleaf_lab"], "tests.typechecker.check")
    checked.hook.should_instrument = lambda name: (
        name.split(".")[0] in ("looseleaf", "looseleaf_lab") and not name.endswith(".kernel")
    )


def _settle_hypothesis() -> None:
    """The same examples in every run, few enough for two cores; slow machines are no failure."""
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "looseleaf",
        deadline=None,
        derandomize=True,
        max_examples=30,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "looseleaf"))


if os.environ.get("CHECK_SHAPES"):
    _check_shapes()
# the GPU rung runs under a Python that may lack it
if find_spec("hypothesis"):
    _settle_hypothesis()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("looseleaf")
    group.addoption("--product", action="store_true", help="leave out what `make test` leaves out")
    group.addoption("--rest", action="store_true", help="run only what --product leaves out")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("--product") and collection_path in REST else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if any(path in (item.path, *item.path.parents) for path in REST):
            item.add_marker(pytest.mark.full)
        if item.path in SMOKE:
            item.add_marker(pytest.mark.smoke)
        if any(path in (item.path, *item.path.parents) for path in SHAPES):
            item.add_marker(pytest.mark.shapes)
    product, rest = config.getoption("--product"), config.getoption("--rest")
    if product or rest:
        chosen = [item for item in items if bool(item.get_closest_marker("full")) == rest]
        config.hook.pytest_deselected(items=[item for item in items if item not in {*chosen}])
        items[:] = chosen
