"""The Triton kernels on a CUDA device: the checks of ``bench.gpu``, which runs by itself, too, and times attention."""

import pytest
import torch

from bench.gpu_checks import CHECKS, Check, name_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_on_the_device(check: Check) -> None:
    torch.manual_seed(0)
    check("cuda", False)
    torch.cuda.synchronize()
