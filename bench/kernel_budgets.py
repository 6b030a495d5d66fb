"""What a compiled attention kernel may take: enough warps have to fit on a processor to hide the memory's latency.

A processor (streaming multiprocessor, compute unit) has its registers and its shared memory; what a program takes of
both says how many programs run there at a time.
"""

from __future__ import annotations

REGISTERS, AMD_REGISTERS = 64 * 1024, 128 * 1024
"""Of a processor, 32 bits each."""
SHARED_KIB = {"sm_80": 164, "sm_90": 228, "sm_100": 228, "gfx942": 64}
"""Of a processor; NVIDIA's keep one KiB for each program."""
LEAST_WARPS, LEAST_WARPS_OF_DECODE = 8, 12
"""On a processor at a time; the larger one for decode of 16-bit types with up to 128 dims a head, which only reads."""


def resident_warps(target: str, warps: int, registers: int, shared_bytes: int) -> int:
    """How many warps of such programs (``warps``, registers a thread, bytes each) a processor holds at a time."""
    threads = 64 if target.startswith("gfx") else 32
    whole = AMD_REGISTERS if threads == 64 else REGISTERS
    programs = min(whole // (max(1, registers) * threads * warps), 64 // warps)
    if shared_bytes:
        reserved = 0 if threads == 64 else 1024
        programs = min(programs, SHARED_KIB[target] * 1024 // (shared_bytes + reserved))
    return programs * warps


def least_warps(name: str) -> int:
    """``name``: of a configuration in ``bench.kernels_report``."""
    small = not any(f" d{dims}" in name for dims in (192, 256))
    reads_only = name.startswith(("decode bf16", "decode fp16")) and "71/1" not in name and not name.endswith(" pages")
    return LEAST_WARPS_OF_DECODE if small and reads_only else LEAST_WARPS
