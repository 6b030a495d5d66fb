"""What every kernel asks first: its arguments are torch tensors, strided ones, and nobody counts on their gradients."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from radixkv.errors import BadRequest


def tensors(**given: object) -> None:
    """BadRequest with the name of the first argument that is none. What holds several (quantized pages) is opened."""
    for name, argument in given.items():
        if is_dataclass(argument):
            optional(**{f"{name}'s {field.name}": getattr(argument, field.name) for field in fields(argument)})
        elif not isinstance(argument, Tensor):
            hint = " (torch.from_numpy makes one)" if type(argument).__module__ == "numpy" else ""
            raise BadRequest(f"{name} is not a torch tensor{hint}", type=type(argument).__name__)
        elif argument.layout != torch.strided:
            raise BadRequest(f"{name} is not a strided tensor", layout=str(argument.layout))
        elif argument.requires_grad and torch.is_grad_enabled():
            raise BadRequest(f"{name} requires gradients, which these kernels do not make: use torch.no_grad()")


def optional(**given: object) -> None:
    """As ``tensors``, of those that are not None."""
    tensors(**{name: argument for name, argument in given.items() if argument is not None})
