"""Prints, for the merge as a chained kernel, once with numbers that the host sent and once with
others, whether it reads anything of the device before it has waited for the kernel before."""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from looseleaf.ops.merge_states.kernel import _merge_states_kernel

_POINTERS = {
    "states_out": "*fp32", "states_lse": "*fp32", "out": "*bf16", "lse": "*fp32",
    "row_state_indptr": "*i32",
}  # fmt: skip
_CONSTANTS = {
    "HEAD_DIM": 64, "CHAINED": True, "HEADS": 1, "FEW": 0, "BLOCK_L": 32, "BLOCK_S": 8,
    "BLOCK_D": 64,
}  # fmt: skip
_OPTIONS = {"num_warps": 1, "enable_fp_fusion": True}
_ABSENT = ("carried_out", "carried_lse", "kept_at", "kept_first", "kept_fresh")

for sent in (True, False):
    constants = {**_CONSTANTS, "INDPTR_READY": sent} | dict.fromkeys(_ABSENT)
    names = [parameter.name for parameter in _merge_states_kernel.params]
    signature = {n: "constexpr" if n in constants else _POINTERS.get(n, "i32") for n in names}
    source = ASTSource(_merge_states_kernel, signature, constexprs=constants)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=_OPTIONS)
    read = re.search(r"ld\.global", built.asm["ptx"])
    wait = re.search(r"griddepcontrol\.wait", built.asm["ptx"])
    assert read is not None and wait is not None, "a merge that reads and waits"
    print("early" if read.start() < wait.start() else "late")
