"""Compiles the Triton kernels ahead of time, as they would be launched, without a GPU, and says what each takes.

The launchers run on CPU tensors with the kernels replaced by recorders, so that types, divisibility, constants, warps
and stages are those of a real launch, by the rules of Triton's just-in-time specialisation. Not in a process with
TRITON_INTERPRET set: nothing can be compiled there.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixkv.kernels import blocks, triton_attention, triton_quantized, triton_write

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Shared memory (LDS) that one program may have."""
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
OPTIONS = ("num_warps", "num_stages", "maxnreg")
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32",
            torch.uint8: "*u8", torch.int8: "*i8",
            torch.int64: "*i64", torch.bool: "*i1"}  # fmt: skip
KERNELS = (
    (triton_attention, "plan"), (triton_attention, "attend"), (triton_attention, "merge"),
    (triton_write, "append_tokens"), (triton_quantized, "append_quantized"), (triton_write, "copy_page_rows"),
    (triton_write, "move_pages"),
)  # fmt: skip


class Launch(NamedTuple):
    kernel: Any
    args: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@dataclass
class Recorder:
    """Stands in for a kernel: remembers its launches."""

    kernel: Any
    launches: list[Launch]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **named: self.launches.append(Launch(self.kernel, args, named))


@dataclass(frozen=True)
class Built:
    """``spilled``: bytes a thread keeps in local memory. ``wide_loads``: instructions that read 16 bytes a thread from
    global memory; ``tensor_cores``: matrix instructions."""

    registers: int
    spilled: int
    shared_bytes: int
    wide_loads: int
    tensor_cores: int


def recorded(work: Callable[[], object]) -> list[Launch]:
    """The launches of this work, none of which happens."""
    launches: list[Launch] = []
    kernels = [getattr(module, name) for module, name in KERNELS]
    for (module, name), kernel in zip(KERNELS, kernels, strict=True):
        setattr(module, name, Recorder(kernel, launches))
    try:
        work()
    finally:
        for (module, name), kernel in zip(KERNELS, kernels, strict=True):
            setattr(module, name, kernel)
    return launches


@contextmanager
def standing_for(target: str) -> Iterator[None]:
    """Launchers choose the block sizes of this target meanwhile, as if their CPU tensors lay on one."""
    before = blocks.ON_CPU
    blocks.ON_CPU = target
    try:
        yield
    finally:
        blocks.ON_CPU = before


def build(launch: Launch, target: str, **more: int) -> Built:
    options = {name: launch.named[name] for name in OPTIONS if name in launch.named} | more
    done = triton.compile(_source(launch), target=TARGETS[target], options=options)
    if target.startswith("gfx"):
        return _amd(done)
    taken = _usage(done.asm["cubin"])
    ptx = done.asm["ptx"]
    wide = len(re.findall(r"cp\.async\.cg\.shared\.global|ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", ptx))
    tensor = len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx))
    return Built(taken["REG"], taken["STACK"] + taken["LOCAL"], done.metadata.shared, wide, tensor)


def _amd(done: Any) -> Built:
    """Scalar registers that were spilled lie in vector registers there, which the count of those includes."""
    text = done.asm["amdgcn"]

    def number(name: str) -> int:
        return sum(int(found) for found in re.findall(rf"\.{name}:\s+(\d+)", text))

    wide = len(re.findall(r"(?:global|buffer)_load_dwordx4", text))
    matrix = len(re.findall(r"\bv_mfma", text))
    return Built(number("vgpr_count"), number("private_segment_fixed_size"), done.metadata.shared, wide, matrix)


def _source(launch: Launch) -> ASTSource:
    """The kernel specialised for these arguments: pointers and strides divisible by 16, strides of 1 as constants."""
    kernel, args, named = launch
    general = set(kernel.do_not_specialize or ())
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes = {}
    for place, name in enumerate(kernel.arg_names):
        value = args[place] if place < len(args) else named[name]
        one = isinstance(value, int) and value == 1 and name not in general
        if place >= len(args) or value is None or one:
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name], multiple = POINTERS[value.dtype], value.data_ptr()
        elif isinstance(value, float):
            signature[name], multiple = "fp32", 1
        else:
            signature[name], multiple = "i64" if value >= 2**31 else "i32", value
        if multiple % 16 == 0 and name not in general:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def _usage(cubin: bytes) -> dict[str, int]:
    """What the assembler gave the kernel: REG a thread, STACK and LOCAL bytes a thread (spills)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
