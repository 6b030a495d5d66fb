"""Log lines reach whoever reads, and nobody waits for those who do not."""

from __future__ import annotations

import os

import pytest

from radixkv.ipc import log
from radixkv.ipc.log import LINE_MAX, Lines


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        try:
            os.close(fd)
        except OSError:
            continue


def test_each_line_is_written_whole_and_ends_once(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    lines = Lines(writer)
    lines.write("one")
    lines.write("two \ud800\n")
    lines.write("x" * 2 * LINE_MAX)
    one, two, long = os.read(reader, 3 * LINE_MAX).splitlines(keepends=True)
    assert (one, two) == (b"one\n", b"two ?\n")
    assert len(long) == LINE_MAX and long.endswith(b"x\n")
    assert lines.dropped == 0


def test_a_pipe_that_nobody_reads_fills_up_and_then_drops(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    lines = Lines(writer)
    for _ in range(100):
        lines.write("x" * 2000)
    assert 0 < lines.dropped < 100
    os.read(reader, 10_000)
    before = lines.dropped
    lines.write("heard again")
    assert lines.dropped == before


@pytest.mark.parametrize("end", [0, 1])
def test_a_closed_end_is_no_error(pipe: tuple[int, int], end: int) -> None:
    lines = Lines(pipe[1])
    os.close(pipe[end])
    lines.write("into the void")
    assert lines.dropped == 1


def test_the_logger_writes_logfmt(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pipe
    monkeypatch.setattr(log, "_STDERR", writer)
    logger, lines = log.open_log()
    logger.info("draining", signal="SIGTERM", at_most_s=1.5)
    logger.debug("not shown")
    logger.critical("broken", exc_info=ValueError("two\nlines"))
    info, critical = os.read(reader, 10_000).decode().splitlines()
    assert info.startswith("timestamp=") and info.endswith("level=info event=draining signal=SIGTERM at_most_s=1.5")
    assert "level=critical event=broken" in critical and r"ValueError: two\nlines" in critical
    assert lines.dropped == 0
