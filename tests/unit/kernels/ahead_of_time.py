"""Compiles the kernels for sm_90 as they would be launched, without a GPU; prints what each takes, one JSON line each.

Run by ``test_ahead_of_time.py`` in a process of its own: nothing can be compiled where TRITON_INTERPRET is set. The
launchers run on CPU tensors with the kernels replaced by recorders, so that types, divisibility, constants, warps and
stages are those of a real launch, by the rules of Triton's just-in-time specialisation.
"""

import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.kernel_cases import Shape, empty_arena, make_case
from radixkv.kernels import triton_decode, triton_write

TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
OPTIONS = ("num_warps", "num_stages", "maxnreg")
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32",
            torch.int64: "*i64"}  # fmt: skip


@dataclass
class Recorder:
    """Stands in for a kernel: remembers its launches."""

    kernel: Any
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **named: self.launches.append((self.kernel, args, named))


def source(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> ASTSource:
    """The kernel specialised for these arguments: pointers and strides divisible by 16, strides of 1 as constants."""
    general = set(kernel.do_not_specialize or ())
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = args[place] if place < len(args) else named[name]
        if place >= len(args) or (isinstance(value, int) and value == 1 and name not in general):
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


def resources(cubin: bytes) -> dict[str, int]:
    """What the assembler gave the kernel: REG a thread, STACK and LOCAL bytes a thread (spills), SHARED bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", said)}


def compiled(launch: tuple[Any, tuple[Any, ...], dict[str, Any]], **more: int) -> dict[str, int]:
    kernel, args, named = launch
    options = {name: named[name] for name in OPTIONS if name in named} | more
    done = triton.compile(source(kernel, args, named), target=TARGET, options=options)
    wide = done.asm["ptx"].count("cp.async.cg.shared.global")  # copies of 16 bytes, asynchronous
    return {**resources(done.asm["cubin"]), "dynamic_shared": done.metadata.shared, "wide_loads": wide}


def launches_of(shape: Shape) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The four kernels as launched for pages of this shape, decode attention with slices to merge."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    places = [(triton_decode, "attend"), (triton_decode, "merge"), (triton_write, "append_tokens"),
              (triton_write, "copy_page_rows")]  # fmt: skip
    kernels = [getattr(module, name) for module, name in places]
    for (module, name), kernel in zip(places, kernels, strict=True):
        setattr(module, name, Recorder(kernel, launches))
    try:
        case = make_case(shape, fill=0.0)
        triton_decode.decode_attention(case.q, case.pages, case.page_table, case.lengths, 0.125, splits=8)
        tokens = torch.zeros(4, shape.kv_heads, shape.head_dim, dtype=shape.dtype)
        arena = empty_arena(shape.layout, 2, 0.0)
        triton_write.append(tokens, tokens, arena[:, 0, 0], arena[:, 0, 1], torch.arange(4))
        triton_write.copy_rows(arena, torch.zeros(1, 3, dtype=torch.int32))
    finally:
        for (module, name), kernel in zip(places, kernels, strict=True):
            setattr(module, name, kernel)
    return {launch[0].fn.__name__: launch for launch in launches}


def shapes() -> dict[str, Shape]:
    """Each dtype, head dim and page size as GQA; MHA, MQA (a larger block of query heads) and the demo's model."""
    some = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for head_dim, page_size in ((64, 16), (64, 32), (128, 16), (128, 32)):
            some[f"gqa {dtype} d{head_dim} s{page_size}"] = Shape([300], 32, 8, head_dim, page_size, dtype)
    for name, heads in (("mha", (8, 8)), ("mqa", (32, 1))):
        some[f"{name} torch.float16 d128 s16"] = Shape([300], *heads, 128, 16, torch.float16)
    some["smollm2 torch.float32 d64 s16"] = Shape([300], 9, 3, 64, 16, torch.float32)
    return some


def main() -> None:
    seen: set[tuple[str, int, int]] = set()
    for name, shape in shapes().items():
        for kernel, launch in launches_of(shape).items():
            kind = (kernel, shape.dtype.itemsize, shape.head_dim)
            if kernel != "attend" and kind in seen:
                continue  # the others move elements, whatever they mean, and heed the page size only in an address
            seen.add(kind)
            print(json.dumps({"kernel": kernel, "shape": name, **compiled(launch)}), flush=True)
    launch = launches_of(shapes()["gqa torch.float16 d128 s16"])["attend"]
    print(json.dumps({"kernel": "attend", "shape": "canary", **compiled(launch, maxnreg=32)}), flush=True)


if __name__ == "__main__":
    main()
