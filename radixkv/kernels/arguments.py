"""What every kernel asks first: its arguments are what they should be at all, and nobody counts on their gradients."""

from __future__ import annotations

from numbers import Integral, Real

import torch
from torch import Tensor

from radixkv.errors import BadRequest
from radixkv.kernels.quantized import QuantizedPages


def tensors(**given: object) -> None:
    """BadRequest with the name of the first argument that is no strided torch tensor."""
    for name, argument in given.items():
        if not isinstance(argument, Tensor):
            hint = " (torch.from_numpy makes one)" if type(argument).__module__ == "numpy" else ""
            raise BadRequest(f"{name} is not a torch tensor{hint}", type=type(argument).__name__)
        if argument.layout != torch.strided:
            raise BadRequest(f"{name} is not a strided tensor", layout=str(argument.layout))
        if argument.requires_grad and torch.is_grad_enabled():
            raise BadRequest(f"{name} requires gradients, which these kernels do not make: use torch.no_grad()")


def optional(**given: object) -> None:
    """As ``tensors``, of those that are not None."""
    tensors(**{name: argument for name, argument in given.items() if argument is not None})


def pages(**given: object) -> None:
    """As ``tensors``; quantized pages are opened."""
    for name, argument in given.items():
        if isinstance(argument, QuantizedPages):
            tensors(**{f"{name}'s codes": argument.codes})
            optional(**{f"{name}'s scales": argument.scales})
        else:
            tensors(**{name: argument})


def whole(name: str, number: object) -> int:
    """BadRequest for what is no integer. A tensor is none either: to read it could mean to wait for a device."""
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise BadRequest(f"{name} is not an integer", got=repr(number), type=type(number).__name__)
    return int(number)


def real(name: str, number: object) -> float:
    """BadRequest for what is no number, as of ``whole``."""
    if isinstance(number, bool) or not isinstance(number, Real):
        raise BadRequest(f"{name} is not a number", got=repr(number), type=type(number).__name__)
    return float(number)
