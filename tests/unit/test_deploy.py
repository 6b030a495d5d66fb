"""deploy/radixkv.service against the code that it starts. It is read here, not run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from radixkv.config import ServerConfig
from radixkv.ipc.endpoint import resolve
from radixkv.ipc.fdstore import STORE_MAX, find_store

UNIT = Path(__file__).parents[2] / "deploy" / "radixkv.service"


def settings() -> dict[str, list[str]]:
    """All keys of the unit; one may be there several times."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        key, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_the_store_has_room_and_the_daemon_knows_of_it(tmp_path: Path) -> None:
    unit = settings()
    assert unit["FileDescriptorStoreMax"] == [str(STORE_MAX)]
    environment = dict(line.partition("=")[::2] for line in unit["Environment"])
    assert environment["FDSTORE"] == str(STORE_MAX)
    assert unit["Type"] == ["notify"] and unit["NotifyAccess"] == ["main"]
    assert find_store({"FDSTORE": environment["FDSTORE"]}) is None, "without NOTIFY_SOCKET it is not under systemd"


def test_the_sockets_are_where_clients_look_for_root_and_stay_there() -> None:
    unit = settings()
    environment = dict(line.partition("=")[::2] for line in unit["Environment"])
    directory = Path("/run", unit["RuntimeDirectory"][0])
    assert resolve(None, environment).directory == directory
    assert unit["RuntimeDirectoryPreserve"] == ["restart"] and unit["RuntimeDirectoryMode"] == ["0700"]


def test_it_is_started_again_and_may_drain() -> None:
    unit = settings()
    assert unit["Restart"] == ["always"]
    assert unit["RestartPreventExitStatus"] == ["2 3"]
    assert int(unit["TimeoutStopSec"][0].removesuffix("s")) > ServerConfig().drain_s
    assert unit["ExecStart"] == ["/usr/local/bin/radixkv serve"], "not --supervised: systemd is the keeper"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_can_read_it(tmp_path: Path) -> None:
    """With a program and a user that exist here."""
    text = UNIT.read_text(encoding="utf-8").replace("/usr/local/bin/radixkv", "/bin/true").replace("User=radixkv\n", "")
    (tmp_path / "radixkv.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "radixkv.service")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
