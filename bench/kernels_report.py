"""``python -m bench.kernels_report``: every main kernel compiled ahead of time for every target, as a table.

``make kernels-report`` writes it to docs/kernels-report.md with the hash of the kernels' sources; a test fails when
the sources have changed since. ``--few`` compiles what ``make test`` does, at most 12, and prints one JSON object each.
Needs no GPU. Exit 1 if a kernel spills, takes more shared memory than there is, or reads narrowly.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import triton

from bench.compiled import SHARED_BYTES, TARGETS, Built, Launch, build, recorded, standing_for
from bench.kernel_budgets import LEAST_WARPS, LEAST_WARPS_OF_DECODE, least_warps, resident_warps
from bench.kernel_cases import Shape, empty_arena, make_case, sliced
from bench.kernel_problems import random_tree
from radixkv.config import QUANTIZED
from radixkv.kernels import Rotary, attention_launch, group_prefixes, triton_quantized, triton_write
from radixkv.kernels.layout import LayerPages, heads_of
from radixkv.kernels.options import Attention, Batch

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs/kernels-report.md"
SOURCES = ("attention_launch.py", "blocks.py", "triton_attention.py", "triton_quantized.py", "triton_write.py")
FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
LLAMA, SMOLLM2, MQA = (32, 8), (9, 3), (32, 1)
ITEMS = 32
EXACT_LATENT = "latent 512 + 64, fp32, 16 heads"


QUANTIZED_PAGES = (
    *itertools.product(QUANTIZED, (
        "decode bf16 32/8 d128", "shared, 64 rows bf16 32/8 d128", "prefill, every option, bf16 32/8 d128",
    )),
    ("fp8_e4m3", "decode fp16 32/8 d80"), ("int8", "decode fp32 9/3 d64"), ("int4", "decode bf16 16/8 d256"),
    ("int4", "8 queries, every option, bf16 32/8 d128"),
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """One launch: ``pick`` names the kernel of it that is looked at."""

    name: str
    pick: str
    work: Callable[[], object]

    @property
    def targets(self) -> list[str]:
        """Those that it is meant for: float32 latents spill on gfx942."""
        return [target for target in TARGETS if self.name != EXACT_LATENT or target != "gfx942"]


def _attention(shape: Shape, *, every_option: bool = False) -> object:
    case, heads = make_case(shape, fill=0.0), shape.query_heads
    window = 100 if every_option else None
    prefixes = None
    if shape.shared:
        queries = shape.queries or 1
        prefixes = group_prefixes(case.page_table, case.lengths, shape.page_size, queries=queries, window=window)
    if not every_option:
        return sliced(case, ITEMS, prefixes)
    terms = {"softcap": 30.0, "window": 100, "sinks": torch.zeros(heads), "alibi_slopes": torch.zeros(heads)}
    if shape.queries:
        terms["tree_mask"] = random_tree(len(shape.lengths), shape.queries, 0)
    return sliced(case, ITEMS, prefixes, **terms)  # type: ignore[arg-type]


def _latent(heads: int, queries: int, dtype: torch.dtype) -> object:
    pages = torch.zeros(20, 16, 1, 576, dtype=dtype)
    table, lengths = torch.zeros(1, 20, dtype=torch.int32), torch.tensor([300], dtype=torch.int32)
    q = torch.zeros(queries, heads, 576, dtype=dtype)
    batch = Batch(q, LayerPages(pages, pages[..., :512]), table, lengths, queries)
    return attention_launch.attention(batch, Attention.of(576, None), None, attention_launch.Slicing(ITEMS))


def _append(dtype: torch.dtype, *, rotary: bool = False, quantized: str = "") -> object:
    shape = Shape([], kv_heads=8, head_dim=128, dtype=dtype, quantized=quantized)
    arena = empty_arena(shape.layout, 2, 0.0)
    k, q = torch.zeros(4, 8, 128, dtype=dtype), torch.zeros(4, 32, 128, dtype=dtype)
    turn = Rotary(torch.zeros(64, 64), torch.zeros(64, 64), torch.arange(4)) if rotary else None
    layer = LayerPages(*(heads_of(arena[:, 0, kind], shape.layout) for kind in (0, 1)))
    write = triton_quantized if quantized else triton_write
    return write.append(k, k, layer, torch.arange(4), turn, q if rotary else None)


def _move(kernel: str, dtype: torch.dtype) -> None:
    arena = empty_arena(Shape([], kv_heads=8, head_dim=128, dtype=dtype).layout, 4, 0.0)
    if kernel == "copy_page_rows":
        triton_write.copy_rows(arena, torch.zeros(1, 3, dtype=torch.int32))
    else:
        triton_write.gather_pages(
            arena, torch.zeros(1, dtype=torch.int32), torch.zeros(1, *arena.shape[1:], dtype=dtype)
        )


def _decode(dtype: torch.dtype, heads: tuple[int, int], head_dim: int, page_size: int = 16) -> Shape:
    return Shape([300], *heads, head_dim, page_size, dtype)


def configs() -> dict[str, Config]:
    """The main configurations of every kernel, by name."""
    shapes = {
        "decode bf16 32/8 d128": _decode(BRAIN, LLAMA, 128),
        "decode fp16 32/8 d64 s32": _decode(HALF, LLAMA, 64, 32),
        "decode bf16 8/8 d128 s1": _decode(BRAIN, (8, 8), 128, 1),
        "decode fp16 32/1 d128 s256": _decode(HALF, MQA, 128, 256),
        "decode bf16 71/1 d64": _decode(BRAIN, (71, 1), 64),
        "decode fp16 32/8 d32": _decode(HALF, LLAMA, 32),
        "decode fp16 32/8 d80": _decode(HALF, LLAMA, 80),
        "decode bf16 32/8 d96": _decode(BRAIN, LLAMA, 96),
        "decode bf16 32/8 d112": _decode(BRAIN, LLAMA, 112),
        "decode bf16 32/8 d192": _decode(BRAIN, LLAMA, 192),
        "decode bf16 16/8 d256": _decode(BRAIN, (16, 8), 256),
        "decode fp32 9/3 d64": _decode(FLOAT, SMOLLM2, 64),
        "decode fp32 32/8 d128": _decode(FLOAT, LLAMA, 128),
        "8 queries bf16 32/8 d128": Shape([300], *LLAMA, 128, 16, BRAIN, queries=8),
        "shared, 16 rows bf16 32/8 d128": Shape([64] * 16, *LLAMA, 128, 16, BRAIN, shared=True),
        "shared, 64 rows bf16 32/8 d128": Shape([64] * 64, *LLAMA, 128, 16, BRAIN, shared=True),
        "shared, 64 rows bf16 32/8 d64": Shape([64] * 64, *LLAMA, 64, 16, BRAIN, shared=True),
        "shared, 64 rows bf16 16/8 d256": Shape([64] * 64, 16, 8, 256, 16, BRAIN, shared=True),
        "shared, 21 rows fp32 9/3 d64": Shape([64] * 21, *SMOLLM2, 64, 16, FLOAT, shared=True),
        "prefill bf16 32/8 d128": Shape([300], *LLAMA, 128, 16, BRAIN, new_tokens=[200]),
        "prefill fp16 32/8 d64": Shape([300], *LLAMA, 64, 16, HALF, new_tokens=[200]),
        "prefill bf16 16/8 d256": Shape([300], 16, 8, 256, 16, BRAIN, new_tokens=[200]),
        "prefill fp32 9/3 d64": Shape([300], *SMOLLM2, 64, 16, FLOAT, new_tokens=[200]),
    }
    every = {
        "decode, every option, fp32 32/8 d256": _decode(FLOAT, LLAMA, 256),
        "8 queries, every option, bf16 32/8 d128": shapes["8 queries bf16 32/8 d128"],
        "shared, every option, bf16 32/8 d128": Shape([99] * 16, *LLAMA, 128, 16, BRAIN, queries=4, shared=True),
        "prefill, every option, bf16 32/8 d128": shapes["prefill bf16 32/8 d128"],
        "prefill, every option, bf16 16/8 d256": shapes["prefill bf16 16/8 d256"],
    }
    latent = {
        "latent 512 + 64, bf16, 16 heads": (16, 1, BRAIN),
        "latent 512 + 64, bf16, 128 heads": (128, 1, BRAIN),
        "latent 512 + 64, bf16, 16 heads, 4 queries": (16, 4, BRAIN),
        EXACT_LATENT: (16, 1, FLOAT),
    }
    for dtype, name in QUANTIZED_PAGES:
        known = shapes if name in shapes else every
        known[f"{name}, {dtype} pages"] = replace(known[name], quantized=dtype)
    made = [Config(name, "attend", partial(_attention, shape)) for name, shape in shapes.items()]
    made += [Config(name, "attend", partial(_attention, shape, every_option=True)) for name, shape in every.items()]
    made += [Config(name, "attend", partial(_latent, *how)) for name, how in latent.items()]
    made += [
        Config("plan", "plan", partial(_attention, shapes["decode bf16 32/8 d128"])),
        Config("merge bf16 d128", "merge", partial(_attention, shapes["decode bf16 32/8 d128"])),
        Config("merge, shared, bf16 d128", "merge", partial(_attention, shapes["shared, 16 rows bf16 32/8 d128"])),
        Config("append bf16 d128", "append_tokens", partial(_append, BRAIN)),
        Config("append, rotary, bf16 d128", "append_tokens", partial(_append, BRAIN, rotary=True)),
        *(
            Config(
                f"append, rotary, bf16 d128, {dtype} pages",
                "append_quantized",
                partial(_append, BRAIN, rotary=True, quantized=dtype),
            )
            for dtype in QUANTIZED
        ),
        Config("copy_rows bf16 d128", "copy_page_rows", partial(_move, "copy_page_rows", BRAIN)),
        Config("gather fp32 d128", "move_pages", partial(_move, "move_pages", FLOAT)),
    ]
    return {config.name: config for config in made}


FEW = (
    "decode bf16 32/8 d128", "shared, 64 rows bf16 32/8 d128", "8 queries, every option, bf16 32/8 d128, int4 pages",
    "prefill, every option, bf16 32/8 d128", "latent 512 + 64, bf16, 128 heads", "plan", "merge, shared, bf16 d128",
    "append, rotary, bf16 d128", "append, rotary, bf16 d128, int8 pages", "copy_rows bf16 d128", "gather fp32 d128",
)  # fmt: skip
"""What ``make test`` compiles, for sm_90; with one more, built to spill, they are 12."""


def launch_of(config: Config, target: str) -> Launch:
    """The launch as it would be on this target; of several kinds of spans the largest blocks."""
    with standing_for(target):
        return next(launch for launch in recorded(config.work) if launch.name == config.pick)


def faults(name: str, target: str, launch: Launch, built: Built) -> Iterator[str]:
    """What is wrong with a kernel: these are the budgets."""
    if built.spilled:
        yield f"{name} on {target} spills {built.spilled} bytes a thread"
    if built.shared_bytes > SHARED_BYTES[target]:
        yield f"{name} on {target} takes {built.shared_bytes} bytes of shared memory, of {SHARED_BYTES[target]}"
    if launch.name == "attend":
        warps = resident_warps(target, launch.named["num_warps"], built.registers, built.shared_bytes)
        if warps < least_warps(name):
            yield f"{name} on {target}: {warps} warps fit on a processor, of {least_warps(name)} that are needed"
        if built.wide_loads < _least_wide_loads(name, target):
            yield f"{name} on {target} reads narrowly: {built.wide_loads} loads of 16 bytes"
        if "fp32" not in name and built.tensor_cores == 0:
            yield f"{name} on {target} does not use the tensor cores"


def _least_wide_loads(name: str, target: str) -> int:
    """One for keys and one for values; on NVIDIA's also for q and for what is loaded ahead.

    A tile of quantized pages has fewer bytes, with float32 queries, whose tiles are small, less than 16 for a thread.
    """
    if "pages" in name and "fp32" in name:
        return 0
    return 2 if target.startswith("gfx") else 4 if "pages" in name else 6


def sources_hash() -> str:
    """Of all that decides what is compiled, and Triton's version."""
    digest = hashlib.sha256(triton.__version__.encode())
    for name in SOURCES:
        digest.update((Path(attention_launch.__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


def rows() -> Iterator[tuple[str, str, Launch, Built]]:
    for name, config in configs().items():
        for target in config.targets:
            launch = launch_of(config, target)
            yield name, target, launch, build(launch, target)


def main() -> int:
    if "--few" in sys.argv[1:]:
        some = configs()
        for name in FEW:
            launch = launch_of(some[name], "sm_90")
            built = build(launch, "sm_90")
            wrong = list(faults(name, "sm_90", launch, built))
            print(json.dumps({"name": name, **asdict(built), "faults": wrong}), flush=True)
        spoilt = build(launch_of(some[FEW[0]], "sm_90"), "sm_90", maxnreg=32)
        print(json.dumps({"name": "canary", **asdict(spoilt), "faults": []}), flush=True)
        return 0
    wrong = []
    lines = []
    for name, target, launch, built in rows():
        wrong += faults(name, target, launch, built)
        blocks = launch.named
        size = f"{blocks['BLOCK_M']} x {blocks['BLOCK_N']}" if launch.name == "attend" else ""
        lines.append(
            f"| {name} | {target} | {size} | {blocks['num_warps']} | {built.registers} | {built.spilled} "
            f"| {built.shared_bytes / 1024:.0f} | {built.wide_loads} | {built.tensor_cores} |"
        )
        print(lines[-1], flush=True)
    if "--write" in sys.argv[1:]:
        head = HEAD.format(
            hash=sources_hash(), triton=triton.__version__, all=LEAST_WARPS, decode=LEAST_WARPS_OF_DECODE
        )
        REPORT.write_text(head + "\n".join(lines) + "\n")
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


HEAD = """# Kernels, compiled

Made by `make kernels-report`; a test fails when the kernels have changed since. Nothing here has run on a GPU: the
kernels are compiled ahead of time, with the arguments of a real launch, by Triton {triton}.

Sources: `{hash}`

*Registers* a thread (of gfx942: vector registers, scalar ones spilled to them included). *Spilled*: bytes a thread in
local memory; must be 0. *Shared*: KiB a program. *Wide*: instructions that load 16 bytes a thread from global memory;
*matrix*: tensor-core instructions. *Block*: query rows x tokens.

Budgets, which `make kernels-report` and the tests hold: nothing spills; registers and shared memory are such that
{all} warps of an attention kernel fit on a processor at a time, {decode} of 16-bit decode with up to 128 dims a head;
pages are read 16 bytes a thread at a time; 16-bit types use the tensor cores.

| kernel | target | block | warps | registers | spilled | shared | wide | matrix |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


if __name__ == "__main__":
    sys.exit(main())
