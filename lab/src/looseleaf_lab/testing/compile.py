"""Compiles kernels for an absent GPU: the launcher's specializations, down to the binary.

TRITON_INTERPRET must be unset when triton is imported. Nothing runs, so the tensors of a launch may
be small ones on the CPU.
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
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: name, bytes of binary and shared memory, and the numbers of the hardware
    barriers in its code."""

    name: str
    binary_bytes: int
    shared_bytes: int
    barriers: tuple[int, ...] = ()


@contextmanager
def compiling(*kernels: Any) -> Iterator[list[Compiled]]:
    """Inside, a launch of one of ``kernels`` compiles it for an H100, and appends to the list."""
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
        # the launcher of triton specializes None and 1 as constants, and multiples of 16
        special = kind[0] == "i" and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = kind
        if kind[0] == "*" or (special and value % 16 == 0):
            hints[(parameter.num,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=hints)
    binary = triton.compile(source, target=H100, options=options)
    return Compiled(binary.metadata.name, len(binary.asm["cubin"]), binary.metadata.shared)


def _compile_gluon(kernel: Any, values: dict[str, Any], options: dict[str, Any]) -> Compiled:
    """The same for Gluon kernels, with explicit layouts, descriptors and tuples."""
    signature, constants = {}, {}
    for parameter in kernel.params:
        value = values[parameter.name]
        kind = "constexpr" if parameter.is_constexpr else mangle_type(value)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
    source = GluonASTSource(kernel, signature, constexprs=constants)
    options_set = {name: value for name, value in options.items() if value is not None}
    binary = triton.compile(source, target=H100, options=options_set)
    barriers = {int(number) for number in _BARRIER.findall(binary.asm["ptx"])}
    size = len(binary.asm["cubin"])
    return Compiled(binary.metadata.name, size, binary.metadata.shared, tuple(sorted(barriers)))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32" if isinstance(value, float) else "constexpr"
