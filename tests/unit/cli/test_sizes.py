"""Byte counts as people write them."""

import pytest

from radixkv.cli import sizes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("737280", 737280),
        ("1_000", 1000),
        ("4096B", 4096),
        ("1KiB", 1024),
        ("512MiB", 512 * 2**20),
        (" 24 GiB ", 24 * 2**30),
        ("2TiB", 2 * 2**40),
    ],
)
def test_a_size_is_read(text: str, count: int) -> None:
    assert sizes.parse(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "5MB", "5mib", "1.5GiB", "-1", "0x10", "1 2", "_1", "٣"])
def test_what_is_no_size_is_not_guessed(text: str) -> None:
    assert sizes.parse(text) is None


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (737280, "720 KiB"), (1_342_177_280, "1.25 GiB")],
)
def test_a_size_is_shown_in_its_largest_unit(count: int, text: str) -> None:
    assert sizes.show(count) == text


def test_what_a_size_of_other_units_may_have_meant() -> None:
    assert [sizes.near(text) for text in ("24GB", "5 mb", "1g")] == ["24GiB", "5MiB", "1GiB"]
    assert [sizes.near(text) for text in ("GB", "5", "5 PB", "-1GB")] == [None] * 4
