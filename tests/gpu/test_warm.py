"""Once an engine is warm, no request waits for a kernel that is compiled."""

import random
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

from looseleaf import Fuse, SamplingParams
from looseleaf.config import CacheConfig, EngineConfig, SchedulerConfig
from looseleaf.models import Decoder
from looseleaf.ops.compiled import num_compiled
from looseleaf.prompt.request import DocumentPart, Request, TextPart
from looseleaf_lab.bench.model_shapes import model_shape
from looseleaf_lab.bench.random_model import random_engine, random_weights

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: run make test-gpu"
)

POLICIES = [
    None,
    Fuse("random", ratio=0.2),
    Fuse("first", tokens=8),
    Fuse("question", ratio=0.2),
    Fuse("deviation", ratio=0.2),
    Fuse("links", ratio=0.2),
]


def _kernels():
    for name, module in list(sys.modules.items()):
        if name.startswith("looseleaf.ops."):
            for value in vars(module).values():
                if hasattr(value, "device_caches"):
                    yield value


def _forget_kernels():
    """As in a new process: whatever tests before this one compiled."""
    for kernel in _kernels():
        kernel.device_caches.clear()


def _compiled():
    """How often each kernel is compiled, by its name."""
    kernels = {id(kernel): kernel for kernel in _kernels()}.values()
    counts = Counter()
    for kernel in kernels:
        counts[kernel.fn.__name__] += sum(len(cache[0]) for cache in kernel.device_caches.values())
    return counts


def test_the_rehearsal_finds_the_kernels_of_the_warmup():
    """Kernels that it misses would compile one after another."""
    device = torch.device("cuda")
    settings = EngineConfig(device="cuda", max_model_len=4096, cache=CacheConfig(num_pages=6000))
    engine = random_engine("small", settings, device)
    _forget_kernels()
    engine.runner._compile_kernels(lambda *_: None)
    ahead = _compiled()
    assert ahead.total() > 10
    engine.runner.warm_up()
    assert _compiled() == ahead


def test_a_mix_of_requests_compiles_no_kernel_once_the_engine_is_warm():
    device = torch.device("cuda")
    # the kernels of that generation want heads of 64 in 16 bits, tiles of 128
    shape = replace(model_shape("small"), torch_dtype="bfloat16", intermediate_size=256)
    decoder = Decoder(shape, random_weights(shape, torch.bfloat16, device))
    settings = EngineConfig(
        device="cuda",
        max_model_len=4096,
        cache=CacheConfig(num_pages=6000),
        scheduler=SchedulerConfig(max_num_seqs=32),
    )
    _forget_kernels()
    assert num_compiled() == 0
    engine = random_engine("small", settings, device, decoder)
    engine.runner.warm_up()
    warm = num_compiled()
    assert warm > 10 and engine.snapshot().kernels == warm
    before = _compiled()
    assert before.total() == warm
    rng = random.Random(0)

    def tokens(length):
        return tuple(rng.choices(range(2, 512), k=length))

    documents = [tokens(rng.randrange(100, 600)) for _ in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    compilations = {}
    for policy in POLICIES:
        # alone, together, and one after another
        for number, between in ((1, 0), (5, 0), (25, 0), (6, 3)):
            for n in range(number):
                drawn = rng.sample(documents, 3)
                parts = (*(DocumentPart(d, 0, "d") for d in drawn), TextPart(tokens(17 + 3 * n)))
                name = f"{policy} {number} {between} {n}"
                engine.add(Request(name, parts, params, fuse=policy))
                for _ in range(between):
                    engine.step()
            while engine.has_work:
                engine.step()
        compilations[str(policy)] = dict(_compiled() - before)
    for number, length in ((1, 3001), (3, 700), (40, 33)):
        for n in range(number):
            engine.add(Request(f"text {number} {n}", (TextPart(tokens(length + n)),), params))
        while engine.has_work:
            engine.step()
        compilations[f"{number} texts"] = dict(_compiled() - before)
    assert not any(compilations.values()), compilations
    engine.check()
