"""The house rules that a machine can check: who imports whom, what loads what, and what nobody may call."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import radixkv

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "radixkv"
SOURCES = sorted(PACKAGE.rglob("*.py"))

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {"recv_pyobj", "send_pyobj", "recv_serialized", "unsafe_load", "full_load"}
FORBIDDEN_FUNCTIONS = {"torch.load", "torch.save", "yaml.load", "numpy.load", "np.load", "os.system", "os.popen"}


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter, in which nothing is loaded yet."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def loaded_by(module: str, *suspects: str) -> set[str]:
    """Which of ``suspects`` are loaded after ``module`` was imported."""
    done = python(f"import sys, {module}; print(*[name for name in {suspects!r} if name in sys.modules])")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_imports_go_one_way() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = python(code)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_radixkv_loads_nothing_large() -> None:
    large = ("torch", "zmq", "msgspec", "numpy", "cyclopts", "rich", "structlog", "asyncio", "radixkv.aio")
    assert loaded_by("radixkv", *large) == set()


def test_every_public_name_is_there() -> None:
    for name in radixkv.__all__:
        assert getattr(radixkv, name) is not None
        assert name in dir(radixkv)
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = radixkv.nothing_like_this


def test_the_daemon_never_loads_torch() -> None:
    assert loaded_by("radixkv.daemon", "torch", "triton", "transformers", "cuda") == set()


def test_the_command_line_starts_without_what_its_commands_need() -> None:
    assert loaded_by("radixkv.cli.app", "torch", "zmq", "msgspec", "numpy", "rich", "radixkv.daemon") == set()


def test_kernels_load_with_torch_and_triton_alone() -> None:
    others = ("zmq", "msgspec", "xxhash", "structlog", "rich", "cyclopts", "transformers", "msgpack")
    code = f"""
import sys
for name in {others!r}:
    sys.modules[name] = None  # importing it is an ImportError now
import radixkv.kernels
assert callable(radixkv.kernels.decode_attention)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def violations(path: Path) -> list[str]:
    """Every use in one file of something that executes, or unpickles, what it is given."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.partition(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in FORBIDDEN_MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                found.append(name)
            case ast.Attribute(attr=name) if name in FORBIDDEN_ATTRIBUTES or ast.unparse(node) in FORBIDDEN_FUNCTIONS:
                found.append(ast.unparse(node))
            case ast.keyword(arg="shell" | "allow_pickle", value=ast.Constant(value=True)):
                found.append(f"{node.arg}=True")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_received_can_be_executed(path: Path) -> None:
    assert violations(path) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import marshal", "eval(text)", "exec(text)",
        "yaml.load(text)", "torch.load(path)", "socket.recv_pyobj()", "run(text, shell=True)",
        "numpy.frombuffer(x, allow_pickle=True)",
    ],
)  # fmt: skip
def test_the_search_for_it_finds_each_kind(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(line + "\n")
    assert violations(path) != []


def test_there_is_no_drawer_for_odds_and_ends() -> None:
    names = {path.name for path in SOURCES}
    assert not names & {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}


def test_the_continuous_integration_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lines = [line.strip() for line in script.splitlines()]
    assert "make lint" in lines
    assert "make test" in lines
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_pinned_torch_is_the_one_that_setup_names() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    assert f" {torch} " in makefile
    assert "+" not in torch
