"""Compile kernels for a GPU that is not there: what a launcher would launch, down to the binary.

Only for a process in which triton is not interpreted: TRITON_INTERPRET must not be set when triton
is imported. Nothing runs; the tensors of the launch may be small ones on the CPU.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import mangle_type

H100 = GPUTarget("cuda", 90, 32)
_BARRIER = re.compile(r"\bbar(?:rier)?\.(?:cta\.)?(?:sync|arrive|red)[.\w]*\s+(\d+)")

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: its name, size in bytes and shared memory, and which of the hardware's
    barriers its code calls by number."""

    name: str
    binary_bytes: int
    shared_bytes: int
    barriers: tuple[int, ...] = ()


@contextmanager
def compiling(*kernels: Any) -> Iterator[list[Compiled]]:
    """Inside, a launch of one of ``kernels`` compiles it for an H100 instead, and is listed."""
    compiled: list[Compiled] = []

    def compiler_of(kernel: Any) -> Callable[..., None]:
        def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            compiled.append(_compile(kernel, args, kwargs))

        return run

    for kernel in kernels:
        kernel.run = compiler_of(kernel)
    try:
        yield compiled
    finally:
        for kernel in kernels:
            del kernel.run


def _compile(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    options = {name: values.pop(name) for name in kwargs if name not in kernel.arg_names}
    if kernel.is_gluon():
        return _compile_gluon(kernel, values, options)
    signature, constants, hints = {}, {}, {}
    for parameter in kernel.params:
        value = values[parameter.name]
        kind = _kind(value)
        # as the launcher of triton specialises: None and 1 are constants, 16 divides or does not
        if parameter.is_constexpr or value is None or (kind[0] == "i" and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = kind
        if kind[0] == "*" or (kind[0] == "i" and value % 16 == 0):
            hints[(parameter.num,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=hints)
    built = triton.compile(source, target=H100, options=options)
    return Compiled(built.metadata.name, len(built.asm["cubin"]), built.metadata.shared)


def _compile_gluon(kernel: Any, values: dict[str, Any], options: dict[str, Any]) -> Compiled:
    """The same for kernels that lay out their tiles themselves, and take descriptors and tuples."""
    signature, constants = {}, {}
    for parameter in kernel.params:
        value = values[parameter.name]
        kind = "constexpr" if parameter.is_constexpr else mangle_type(value)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
    source = GluonASTSource(kernel, signature, constexprs=constants)
    given = {name: value for name, value in options.items() if value is not None}
    built = triton.compile(source, target=H100, options=given)
    called = {int(number) for number in _BARRIER.findall(built.asm["ptx"])}
    size = len(built.asm["cubin"])
    return Compiled(built.metadata.name, size, built.metadata.shared, tuple(sorted(called)))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32" if isinstance(value, float) else "constexpr"
