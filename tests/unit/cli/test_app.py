"""The command line's entry: what it prints where, and with which code it ends."""

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.cli.app import COMMANDS, app, main
from radixkv.version import VERSION

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of whoever runs the tests reaches them."""
    for name in [name for name in os.environ if name.startswith("RADIXKV_")]:
        monkeypatch.delenv(name)


def test_help_says_what_each_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [line.strip("│ ") for line in out.splitlines()]
    for command in COMMANDS:
        assert any(line.startswith(f"{command} ") and len(line.split()) > 2 for line in lines)


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: radixkv COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [[name] for name in COMMANDS if name not in ("bench", "model")] + [["bench", "vllm"], ["model", "fetch"]]
)
def test_every_command_explains_every_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"Usage: radixkv {' '.join(command)}" in out
    found = app
    for word in command:
        found = found[word]
    flags = [argument for argument in found.assemble_argument_collection() if not argument.children]
    assert flags
    for flag in flags:
        assert flag.parameter.help, flag.names
        assert flag.names[0] in out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == VERSION


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["servee"], 'Did you mean "serve"?'),
        (["serve", "--leas-s", "3"], "Did you mean --lease-s?"),
        (["serve", "--lease-s", "abc"], "server.lease_s = 'abc' is not allowed; allowed: seconds from 0.1 to 86400"),
        (["serve", "--limits.tokens", "0"], "limits.tokens = 0 is not allowed"),
        (["serve", "--pool", "pags=1"], "did you mean pages"),
        (["serve", "--config", "/no/file.toml"], "'/no/file.toml' cannot be read"),
        (["serve", "--endpoint", "tcp://1.2.3.4:5"], "server.endpoint"),
        (["serve", "extra"], "extra"),
        (["stat", "--every", "0"], "every = 0.0 is not allowed"),
        (
            ["bench", "vllm", "--way", "magic"],
            "way = 'magic' is not allowed; allowed: radixkv, in_place, own, offloading, nothing",
        ),
        (["bench", "vllm", "--questions", "1"], "questions = 1 is not allowed"),
        (["bench", "vllm", "--python", "/no/python"], "python = '/no/python' is not allowed"),
        (["model", "fetch", "gpt9"], "smollm2"),
        (["model", "fetch"], "NAME"),
        (["completion", "tcsh"], "bash"),
    ],
)
def test_a_wrong_command_line_is_one_line_on_stderr_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("radixkv: ")
    assert err.count("\n") == 1
    assert part in err


def test_a_wrong_variable_ends_serve_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXKV_SERVER__LEASE_S", "-1")
    assert main(["serve"]) == 2
    assert "(from RADIXKV_SERVER__LEASE_S)" in capsys.readouterr().err


def test_no_daemon_is_exit_1_with_the_fix(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["stat", "--endpoint", f"ipc://{tmp_path}/radixkv.sock"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "radixkv serve" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_know_the_commands(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert command in out
    assert "lease-s" in out


@pytest.mark.parametrize("arguments", [["demo"], ["model", "fetch", "smollm2"]])
def test_packages_that_are_not_there_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    installed = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else installed(name))
    assert main(arguments) == 2
    assert capsys.readouterr().err == "radixkv: not installed: gguf; pip install -e '.[transformers]' in the checkout\n"


def test_a_document_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--document", "/no/such/file.txt"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    refusal = "cannot read /no/such/file.txt: No such file or directory; give another one with --document"
    assert err == f"radixkv: {refusal}\n"


def test_the_module_can_be_run() -> None:
    command = [sys.executable, "-m", "radixkv", "plan", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith('{"bytes_per_token": 46080')
    assert done.stderr == ""


def test_a_reader_that_goes_away_is_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from radixkv.cli.app import main; sys.exit(main(['plan']))"
    with open(writing, "wb") as closed:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1
    assert done.stderr == b""


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdout", Interrupted())
    assert main(["plan"]) == 130
