"""The same tensors laid out otherwise in memory: kernels may not count on more than they ask for."""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import Tensor

from bench.kernel_cases import NAN, Case


def relaid(tensor: Tensor, rng: random.Random, fill: float) -> tuple[Tensor, Tensor]:
    """(all of the memory, a tensor in it with the same elements): dimensions but the last in another order, gaps of
    ``fill`` between them and at both ends."""
    order = list(range(tensor.dim() - 1))
    rng.shuffle(order)
    strides = [1] * tensor.dim()
    step = tensor.shape[-1] + rng.choice((0, 0, 1, 8))
    for dimension in reversed(order):
        strides[dimension] = step
        step = step * max(1, tensor.shape[dimension]) + rng.choice((0, 0, 3))
    memory = torch.full((step + 5,), fill, dtype=tensor.dtype, device=tensor.device)
    made = memory.as_strided(tensor.shape, strides, rng.choice((0, 1, 5)))
    made.copy_(tensor)
    return memory, made


def spread(tensor: Tensor, fill: float) -> Tensor:
    """The same elements, each but one of the last dimension behind the one before it."""
    return torch.stack([tensor, torch.full_like(tensor, fill)], -1)[..., 0]


def restrided(case: Case, seed: int) -> Case:
    """The same problem of attention with other strides everywhere. Pages of another dtype than q stay as they are."""
    rng = random.Random(seed)
    arena = relaid(case.arena, rng, NAN)[1] if case.arena.dtype == case.q.dtype else case.arena
    q = relaid(case.q, rng, NAN)[1]
    rows, entries = case.page_table.shape
    table = torch.full((rows, 2, entries + 3), 2**31 - 1, dtype=torch.int32, device=q.device)[:, 1, 2 : 2 + entries]
    table.copy_(case.page_table)
    return dataclasses.replace(
        case, arena=arena, q=spread(q, NAN) if rng.random() < 0.3 else q, page_table=table,
        lengths=torch.stack([case.lengths, -case.lengths], 1)[:, 0],
    )  # fmt: skip
