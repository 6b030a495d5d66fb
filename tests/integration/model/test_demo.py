"""The demo as a command: a short document with two questions, so that it takes seconds; the long one is `make demo`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from radixkv.demo.options import DOCUMENT

pytestmark = pytest.mark.model

TEXT = """The harbour of Skerrow has three quays. The Old Quay is 120 metres long and is for fishing boats. The Mail
Quay is 85 metres long, and the ferry and the mail boat lie there. The Long Arm is a wooden pier of 210 metres. The
ferry is called Queen of Ardbeck and her captain is Ruth Amadi. The cat of the lighthouse is called Admiral."""
QUESTIONS = ("Who is the captain of the ferry?", "How long is the Old Quay?")


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``radixkv demo``; everything temporary goes into ``folder``."""
    command = [sys.executable, "-m", "radixkv", "demo", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=170, check=False, env={**os.environ, "TMPDIR": str(folder)}
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, smollm2_files: Any) -> tuple[dict[str, Any], str, Path]:
    """(the JSON object, what was on stderr, the folder for temporary files)."""
    document = tmp_path_factory.mktemp("document") / "harbour.txt"
    document.write_text(TEXT)
    folder = Path(tempfile.mkdtemp(prefix="radixkv-"))  # pytest's own are too long for a socket's path
    done = demo(folder, "--json", "--document", str(document), "--question", QUESTIONS[0], "--question", QUESTIONS[1])
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line), done.stderr, folder


def test_all_went_as_it_must(run: Any) -> None:
    result, _, _ = run
    assert result["ok"] is True
    assert list(result) == ["requests", "kills", "pages", "saved", "boot_ids", "ok"]
    assert [request["id"] for request in result["requests"]] == ["1", "2", "3", "4", "6", "7", "8", "9"]
    assert all(request["equal"] and request["output"] for request in result["requests"])


def test_the_first_computes_and_the_others_find_it_cached(run: Any) -> None:
    first, *others = run[0]["requests"]
    assert first["cached_tokens"] == 0
    for request in others:
        assert request["cached_tokens"] >= 96
        assert request["cached_tokens"] + request["computed_tokens"] == request["prompt_tokens"]
        if request["id"] != "9":  # those had left the device, and came back elsewhere
            assert request["page_table_head"] == first["page_table_head"]
    assert run[0]["saved"]["tokens"] == sum(request["cached_tokens"] for request in others)


def test_three_workers_answered_and_one_was_killed(run: Any) -> None:
    result, _, _ = run
    one, two, again, beside, three, amid, after, back = (request["worker_pid"] for request in result["requests"])
    assert one == again == after
    assert two == beside
    assert three == amid == back
    assert len({one, two, three}) == 3
    kill = result["kills"][0]
    assert f"pid {two}" in kill["what"]
    assert "SIGKILL after 4 tokens" in kill["what"]


def test_the_daemon_was_killed_and_the_next_one_went_on(run: Any) -> None:
    result, shown, _ = run
    assert [kill["what"] for kill in result["kills"][1:]] == ["daemon"]
    assert result["kills"][0]["at_s"] < result["kills"][1]["at_s"]
    assert len(set(result["boot_ids"])) == len(result["boot_ids"]) == 2
    (after,) = [request for request in result["requests"] if request["id"] == "8"]
    assert after["ttft_s"] < max(1.0, after["ttft_uncached_s"] / 10)
    told = re.search(r"(\d+) more tokens came in the (\d+\.\d\d) s until the next daemon", " ".join(shown.split()))
    assert told is not None
    assert 0 < float(told[2]) < 30


def test_no_page_is_held_and_nothing_is_left_behind(run: Any) -> None:
    result, _, folder = run
    assert {state for state, pages in result["pages"].items() if pages} == {"free", "cached"}
    assert sum(result["pages"].values()) == 728
    for request in result["requests"]:
        assert not Path(f"/proc/{request['worker_pid']}").exists()
    folder.rmdir()  # it is empty


def test_progress_goes_to_stderr(run: Any) -> None:
    _, shown, _ = run
    assert "loading" in shown
    assert "6 by worker 3" in shown


def test_a_document_beyond_the_model_is_refused(tmp_path: Path, smollm2_files: Any) -> None:
    document = tmp_path / "long.txt"
    document.write_text("lighthouse " * 9000)
    folder = tmp_path / "a folder for temporary files whose path is too long for a socket" / "so that /tmp is taken"
    folder.mkdir(parents=True)
    done = demo(folder, "--json", "--document", str(document), "--question", "What is it about?")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "this model takes at most 8168" in " ".join(done.stderr.split())
    assert list(folder.iterdir()) == []


def children_of(pid: int | str) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_demo_that_is_ended_early_leaves_nothing_behind(
    smollm2_files: Any, wait_until: Any, number: int, code: int
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="radixkv-"))
    command = [sys.executable, "-m", "radixkv", "demo", "--json"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        try:
            # Its workers have been started, and are loading the model.
            wait_until(lambda: any(folder.glob("*/worker-2.log")), timeout=60, what="the start of the workers")
            children = children_of(running.pid)
            children += [grandchild for child in children for grandchild in children_of(child)]
            running.send_signal(number)
            output, _ = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == code
    assert output == ""
    assert len(children) >= 3 + 1  # workers, keeper; its daemon
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    folder.rmdir()


def test_the_default_document_is_long(smollm2_model: Any) -> None:
    _, tokenizer = smollm2_model
    assert len(tokenizer(DOCUMENT.read_text())["input_ids"]) >= 2000
