"""Whose directory, which files, and that two daemons never share them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from radixkv.config import SOCKET_PATH_MAX
from radixkv.errors import ConfigError, PermissionDenied
from radixkv.ipc.endpoint import (
    Claim,
    Endpoint,
    EndpointInUse,
    check_directory,
    is_claimed,
    is_listening,
    prepare_directory,
    resolve,
)

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return Endpoint(tmp_path / "r.sock")


def test_the_files_of_an_endpoint() -> None:
    found = resolve("ipc:///run/x/radixkv.sock", {})
    assert found.address == "ipc:///run/x/radixkv.sock"
    assert str(found.attach_path) == "/run/x/radixkv.sock.attach"
    assert str(found.lock_path) == "/run/x/radixkv.sock.lock"
    assert resolve("/run/x/radixkv.sock", {}) == found
    assert resolve(Path("/run/x/radixkv.sock"), {}) == found


def test_the_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(resolve("", {"XDG_RUNTIME_DIR": "/run/user/7"}).path) == "/run/user/7/radixkv/radixkv.sock"
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert str(resolve("", {}).path) == "/run/radixkv/radixkv.sock"
    assert str(resolve("", {"XDG_RUNTIME_DIR": "relative"}).path) == "/run/radixkv/radixkv.sock"
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    assert str(resolve(None, {}).path) == "/tmp/radixkv-1234/radixkv.sock"


def test_the_environment_overrides_the_default_and_a_setting_overrides_both() -> None:
    environ = {"RADIXKV_ENDPOINT": "ipc:///a/b.sock", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert str(resolve("", environ).path) == "/a/b.sock"
    assert str(resolve("ipc:///c.sock", environ).path) == "/c.sock"


@pytest.mark.parametrize("named", ["tcp://127.0.0.1:5000", "relative.sock", "ipc://@abstract", "ipc://ipc://x"])
def test_only_a_path_can_be_an_endpoint(named: str) -> None:
    with pytest.raises(ConfigError, match="absolute path"):
        resolve(named, {})


def test_a_path_that_no_socket_can_have_is_refused_with_the_reason() -> None:
    longest = "/" + "x" * (SOCKET_PATH_MAX - 1 - len(".attach"))
    assert len(str(resolve(longest, {}).attach_path)) == SOCKET_PATH_MAX
    with pytest.raises(
        ConfigError, match=f"at most {SOCKET_PATH_MAX} bytes .* has {SOCKET_PATH_MAX + 1}.*RADIXKV_ENDPOINT"
    ):
        resolve(longest + "x", {})
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        resolve("/" + "\u00e9" * 50, {})


def test_a_new_directory_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        endpoint = Endpoint(tmp_path / "new" / "spaces and \u00e9" / "r.sock")
        prepare_directory(endpoint)
    finally:
        os.umask(before)
    assert endpoint.directory.stat().st_mode & 0o777 == 0o700
    prepare_directory(endpoint)


def test_the_default_directory_is_made_private_again(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path / "radixkv" / "r.sock", is_default=True)
    endpoint.directory.mkdir()
    endpoint.directory.chmod(0o755)
    prepare_directory(endpoint)
    assert endpoint.directory.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path / "open" / "r.sock")
    endpoint.directory.mkdir()
    endpoint.directory.chmod(0o770)
    with pytest.raises(PermissionDenied, match="chmod 700"):
        prepare_directory(endpoint)
    endpoint.directory.chmod(0o1777)
    prepare_directory(endpoint)  # sticky, as /tmp: others can neither remove nor replace our files


@needs_root
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path / "theirs" / "r.sock")
    endpoint.directory.mkdir(mode=0o700)
    os.chown(endpoint.directory, 12345, 12345)
    for check in (prepare_directory, check_directory):
        with pytest.raises(PermissionDenied, match="uid 12345"):
            check(endpoint)


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("file", "link", "file/below"):
        for check in (prepare_directory, check_directory):
            with pytest.raises(PermissionDenied):
                check(Endpoint(tmp_path / name / "r.sock"))
    with pytest.raises(FileNotFoundError):
        check_directory(Endpoint(tmp_path / "none" / "r.sock"))


@contextmanager
def locked_out(directory: Path) -> Iterator[None]:
    """Nobody can enter it, whoever runs the tests."""
    user = os.geteuid()
    directory.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        directory.chmod(0o700)


def test_a_directory_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path / "closed" / "inside" / "r.sock")
    endpoint.directory.mkdir(parents=True)
    with locked_out(tmp_path / "closed"):
        for check in (prepare_directory, check_directory):
            with pytest.raises(PermissionDenied, match="Permission denied"):
                check(endpoint)
        assert not is_listening(endpoint.path)


def test_an_endpoint_is_claimed_once_and_given_back(endpoint: Endpoint) -> None:
    claim = Claim(endpoint)
    with pytest.raises(EndpointInUse, match="another daemon"):
        Claim(endpoint)
    claim.release()
    claim.release()
    assert not list(endpoint.directory.iterdir())
    Claim(endpoint).release()


def test_a_claim_ends_with_its_process_however_it_ends(endpoint: Endpoint) -> None:
    program = (
        "import sys; from pathlib import Path; from radixkv.ipc.endpoint import Claim, Endpoint;"
        "claim = Claim(Endpoint(Path(sys.argv[1]))); print('claimed', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(endpoint.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"claimed\n"
        with pytest.raises(EndpointInUse):
            Claim(endpoint)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert endpoint.lock_path.exists()
    Claim(endpoint).release()


def test_a_lock_file_replaced_meanwhile_is_not_taken_for_ours(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking, the former daemon removes its lock file and a third one makes a new one."""
    import fcntl

    real, calls = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not calls:
            endpoint.lock_path.unlink()
            endpoint.lock_path.touch()
        calls.append(fd)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    claim = Claim(endpoint)
    assert len(calls) == 2
    with pytest.raises(EndpointInUse):
        Claim(endpoint)
    claim.release()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
@pytest.mark.parametrize("name", ["path", "attach_path"])
def test_a_socket_file_is_replaced_only_if_nobody_listens(endpoint: Endpoint, kind: int, name: str) -> None:
    path = getattr(endpoint, name)
    with socket.socket(socket.AF_UNIX, kind) as somebody:
        somebody.bind(str(path))
        somebody.listen(1)
        assert is_listening(path)
        with pytest.raises(EndpointInUse, match="somebody listens"):
            Claim(endpoint)
        assert path.exists()
        assert not endpoint.lock_path.exists()
    assert not is_listening(path)
    claim = Claim(endpoint)
    assert not path.exists()
    claim.release()


def test_other_files_are_never_removed(endpoint: Endpoint) -> None:
    endpoint.path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        Claim(endpoint)
    assert endpoint.path.read_text() == "precious"


@pytest.mark.parametrize("endpoint", [7, b"/run/x", 1.5, ["ipc:///run/x"]])
def test_an_endpoint_that_is_no_text_is_refused_by_name(endpoint) -> None:
    with pytest.raises(ConfigError, match="endpoint ="):
        resolve(endpoint, {})


def test_who_has_the_lock_is_seen_without_a_try(tmp_path: Path) -> None:
    """A try would be in the way of a daemon that starts just then."""
    endpoint = Endpoint(tmp_path / "r.sock")
    assert not is_claimed(endpoint)
    claim = Claim(endpoint)
    assert is_claimed(endpoint)
    assert not is_claimed(Endpoint(tmp_path / "other.sock"))
    claim.release()
    assert not is_claimed(endpoint)
    endpoint.lock_path.touch()
    assert not is_claimed(endpoint), "a killed daemon has left it"
