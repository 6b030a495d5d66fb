"""Other kernels on the same work, where they can be imported: FlashInfer and FlashAttention.

They get what suits them: contiguous keys and values, FlashAttention pages of 256 tokens. What is imported and then
refuses is named among what was left out; nobody's bars depend on it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bench.kernel_cases import Case, Shape

Launch = Callable[[], object]
FLASH_PAGE, WORKSPACE_BYTES = 256, 128 * 2**20


def peers(case: Case, shape: Shape, left_out: list[str]) -> Iterator[tuple[str, Launch]]:
    """(name, a decode of this case) of each peer there is. Rows of one length, one query token each."""
    for name, module, make in (
        ("flashinfer", "flashinfer", _flashinfer),
        ("flash_attention", "flash_attn", _flash_attention),
    ):
        try:
            launch = make(importlib.import_module(module), case, shape)
            launch()
        except ImportError as error:
            left_out.append(f"{name}: {error}")
        except Exception as error:  # noqa: BLE001 -- another project's code: whatever it raises is its answer
            left_out.append(f"{name}: {type(error).__name__}: {error}")
        else:
            yield name, launch


def _flashinfer(module: Any, case: Case, shape: Shape) -> Launch:
    """Paged decode after its plan, which is made once for many steps and not timed."""
    batch, pages = case.page_table.shape
    device = case.q.device
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * pages
    last = torch.full((batch,), (shape.lengths[0] - 1) % shape.page_size + 1, dtype=torch.int32, device=device)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    sizes = (shape.query_heads, shape.kv_heads, shape.head_dim, shape.page_size)
    dtypes = {"q_data_type": case.q.dtype, "kv_data_type": case.arena.dtype}
    wrapper.plan(indptr, case.page_table.flatten(), last, *sizes, **dtypes)
    cache = tuple(pages.contiguous() for pages in case.rows)
    return partial(wrapper.run, case.q, cache)


def _flash_attention(module: Any, case: Case, shape: Shape) -> Launch:
    batch, length = len(shape.lengths), shape.lengths[0]
    per_row = -(-length // FLASH_PAGE)
    table = torch.randperm(batch * per_row, device=case.q.device).int().view(batch, per_row)
    caches = []
    for pages in case.rows:
        rows = pages.index_select(0, case.page_table.flatten()).view(batch, -1, shape.kv_heads, shape.head_dim)
        cache = torch.zeros(batch * per_row, FLASH_PAGE, *rows.shape[2:], dtype=pages.dtype, device=pages.device)
        padded = torch.nn.functional.pad(rows[:, :length], (0, 0, 0, 0, 0, per_row * FLASH_PAGE - length))
        cache[table.flatten().long()] = padded.view(-1, FLASH_PAGE, *rows.shape[2:])
        caches.append(cache)
    named = {"cache_seqlens": case.lengths, "block_table": table}
    return partial(module.flash_attn_with_kvcache, case.q[:, None], *caches, **named)
