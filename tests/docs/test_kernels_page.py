"""docs/kernels.md names everything that the kernels offer and every row that their tools print."""

from pathlib import Path

import pytest

from bench.gpu import CHECKS_S, MEMORY_S, TIMES_S
from bench.gpu_times import BARRED, SHARE_OF_COPY
from bench.roofline import LAUNCHES
from radixkv import kernels
from radixkv.kernels.options import Options, Rotary

PAGE = (Path(__file__).parents[2] / "docs/kernels.md").read_text()


@pytest.mark.parametrize("name", sorted({*kernels.__all__} - {"LayerPages", "SharedPrefixes"}))
def test_every_public_name_is_on_the_page(name: str) -> None:
    assert f"`{name}" in PAGE or f"{name}(" in PAGE


@pytest.mark.parametrize("option", [*Options.__annotations__, "tree_mask", "prefixes", "return_lse", *Rotary._fields])
def test_every_option_is_on_the_page(option: str) -> None:
    assert f"`{option}`" in PAGE or (option in Rotary._fields and option in PAGE.split("Rotary(")[1].split(")")[0])


def test_every_row_of_the_roofline_is_on_the_page_with_its_bar() -> None:
    for launch in LAUNCHES:
        line = next(line for line in PAGE.splitlines() if line.startswith(f"| `roofline.{launch.name}`"))
        assert launch.bar is None or line.endswith(f"| {launch.bar} |")
    assert f"`gpu.decode_{BARRED}_of_copy`" in PAGE


def test_the_limits_on_the_page_are_those_of_the_script_and_below_five_minutes() -> None:
    for limit in (CHECKS_S, TIMES_S, MEMORY_S):
        assert f"within {limit:.0f} s" in PAGE.replace("\n", " ")
    assert CHECKS_S + TIMES_S + MEMORY_S < 300
    assert f"at least {SHARE_OF_COPY}" in PAGE


def test_the_page_says_plainly_that_no_gpu_has_run_them() -> None:
    assert "never run on a GPU" in PAGE
    assert "last run on a GPU: never" in PAGE
