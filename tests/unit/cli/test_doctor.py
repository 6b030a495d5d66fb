"""``radixkv doctor``: each check against good and bad machines, and all of them against this one."""

import json
import os
import resource
import socket
from pathlib import Path

import pytest

from radixkv.cli.app import main
from radixkv.cli.checks import cuda, kernel, limits, memory, packages, sockets
from radixkv.cli.checks.check import Check
from radixkv.cli.doctor import as_lines
from radixkv.config import Config, KVSpec, PoolConfig
from radixkv.device.pool_memory import geometry_of
from radixkv.errors import Unavailable
from radixkv.ipc.endpoint import Endpoint

GIB = 2**30
UNLIMITED = resource.RLIM_INFINITY
NO_ANSWER = Unavailable("no answer")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RADIXKV_")]:
        monkeypatch.delenv(name)


class TestMemory:
    config = Config()

    def test_enough(self) -> None:
        found = memory.check(self.config, 16 * GIB, running=False)
        assert found == Check("memory", "ok", "the pools take 511.88 MiB, 16 GiB are available")

    def test_too_little_says_what_would_fit(self) -> None:
        found = memory.check(self.config, 400 * 2**20, running=False)
        assert found.status == "fail"
        assert "the pools take 511.88 MiB, 400 MiB are available" in found.detail
        assert "device_bytes=268MiB" in found.fix

    def test_tight(self) -> None:
        found = memory.check(self.config, 600 * 2**20, running=False)
        assert found.status == "warn"
        assert "weights" in found.detail

    def test_all_pools_count(self) -> None:
        config = Config(pools=(PoolConfig(name="a"), PoolConfig(name="b")))
        assert memory.check(config, GIB, running=False).status == "fail"

    def test_a_running_daemon_has_its_pages_already(self) -> None:
        assert memory.check(self.config, 100 * 2**20, running=True).status == "ok"

    def test_pools_beside_a_running_daemon_are_not_checked(self) -> None:
        found = memory.check(self.config, 100 * 2**20, running=True, asked=True)
        assert (found.status, found.detail) == ("warn", "not checked: a daemon already runs here")


class TestLimits:
    def test_enough_open_files(self) -> None:
        assert limits.open_files((4096, 4096), sessions=256).status == "ok"
        assert limits.open_files((1024, 1_048_576), sessions=256).status == "ok"
        assert limits.open_files((UNLIMITED, UNLIMITED), sessions=256).status == "ok"

    def test_too_few_open_files_for_all_sessions(self) -> None:
        found = limits.open_files((1024, 1024), sessions=256)
        assert found.status == "warn"
        assert "256 sessions need 1,088, 240 can be served" in found.detail
        assert "LimitNOFILE=1088" in found.fix

    def test_too_few_open_files_for_anything(self) -> None:
        assert limits.open_files((32, 32), sessions=256).status == "fail"

    def test_file_size(self) -> None:
        assert limits.file_size(UNLIMITED, GIB).status == "ok"
        assert limits.file_size(GIB, GIB).status == "ok"
        found = limits.file_size(GIB - 1, GIB)
        assert found.status == "fail"
        assert "ulimit -f unlimited" in found.fix

    def test_the_largest_file_may_be_a_table(self) -> None:
        """A few small pages have one of a megabyte."""
        pool = PoolConfig(spec=KVSpec(1, 1, 8, "float32", 4), pages=1)
        assert pool.arena_bytes < limits.largest_file(Config(pools=(PoolConfig(pages=1),))) < 10 * 2**20
        assert limits.largest_file(Config(pools=(pool,))) == geometry_of(pool, "", 256).table_bytes
        assert limits.largest_file(Config()) == PoolConfig().arena_bytes

    def test_locked_memory_is_only_told(self) -> None:
        assert limits.locked_memory(0).status == "ok"
        assert "8 MiB" in limits.locked_memory(8 * 2**20).detail

    def test_this_process(self) -> None:
        assert [check.name for check in limits.checks(Config())] == ["open files", "file size", "locked memory"]


class TestKernel:
    def test_this_machine_has_what_the_other_tests_need(self) -> None:
        found = {check.name: check for check in kernel.checks()}
        assert list(found) == ["sealed memory", "pidfd", "peer pidfd", "fork"]
        assert found["sealed memory"].status == "ok"
        assert found["pidfd"].status == "ok"
        assert found["fork"].status == "ok"

    def test_nothing_stays_open(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        kernel.checks()
        assert len(os.listdir("/proc/self/fd")) == before

    def test_what_the_kernel_refuses_is_a_failure_with_a_fix(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: object) -> int:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "memfd_create", refused)
        monkeypatch.setattr(os, "pidfd_open", refused)
        for check in (kernel.sealed_memory(), kernel.pidfd()):
            assert check.status == "fail"
            assert "Operation not permitted" in check.detail
            assert "Linux" in check.fix


class TestSockets:
    def test_a_directory_of_ones_own(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        assert sockets.directory(Endpoint(tmp_path / "radixkv.sock")).status == "ok"

    def test_a_directory_that_will_be_made(self, tmp_path: Path) -> None:
        found = sockets.directory(Endpoint(tmp_path / "not" / "yet" / "radixkv.sock"))
        assert found.status == "ok"
        assert "serve makes it" in found.detail

    def test_a_directory_others_can_write(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        found = sockets.directory(Endpoint(tmp_path / "radixkv.sock"))
        assert found.status == "fail"
        assert "writable by other users" in found.detail

    def test_a_directory_of_somebody_else(self, tmp_path: Path) -> None:
        if os.getuid() == 0:
            os.chown(tmp_path, 65534, -1)
        theirs = tmp_path if os.getuid() == 0 else Path("/")
        found = sockets.directory(Endpoint(theirs / "radixkv.sock"))
        assert found.status == "fail"
        assert "belongs to uid" in found.detail

    def test_no_daemon(self, tmp_path: Path) -> None:
        found = sockets.daemon(Endpoint(tmp_path / "radixkv.sock"), NO_ANSWER)
        assert (found.status, found.fix) == ("warn", "radixkv serve")

    def test_a_socket_left_behind_is_no_daemon(self, tmp_path: Path) -> None:
        path = tmp_path / "radixkv.sock"
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(os.fspath(path))
        assert sockets.daemon(Endpoint(path), NO_ANSWER).status == "warn"

    def test_a_daemon_that_does_not_answer(self, tmp_path: Path) -> None:
        path = tmp_path / "radixkv.sock"
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.bind(os.fspath(path))
            deaf.listen()
            found = sockets.daemon(Endpoint(path), NO_ANSWER)
        assert found.status == "fail"
        assert "does not answer" in found.detail

    def test_a_daemon_that_answers(self, tmp_path: Path) -> None:
        found = sockets.daemon(Endpoint(tmp_path / "radixkv.sock"), {"version": "9.9"})
        assert found.status == "ok"
        assert "9.9 answers" in found.detail


class TestPackages:
    def test_what_is_missing_is_named(self) -> None:
        installed = {"msgspec": "1", "numpy": "2", "cyclopts": "3", "structlog": "4", "rich": "5"}
        found = packages.needed(installed.get)
        assert found.status == "fail"
        assert found.detail == "not installed: pyzmq, xxhash"
        assert found.fix == "pip install pyzmq xxhash"

    def test_versions_are_told(self) -> None:
        assert packages.needed(packages.version_of).status == "ok"
        assert "msgspec " in packages.needed(packages.version_of).detail

    def test_libzmq(self) -> None:
        assert packages.libzmq().status == "ok"

    @pytest.mark.parametrize("name", packages.OPTIONAL)
    def test_optional_ones_are_only_a_warning(self, name: str) -> None:
        assert packages.optional(name, {name: "1.2"}.get) == Check(name, "ok", "1.2")
        without = packages.optional(name, {}.get)
        assert without.status == "warn"
        assert without.fix.startswith("pip install -e '.[")


class TestCuda:
    """With a driver: tests/cuda."""

    WHY = "there is no CUDA driver"

    def test_nobody_needs_it(self) -> None:
        found = cuda._absent(self.WHY, [], 0)
        assert found.status == "ok" and self.WHY in found.detail

    def test_a_gpu_that_cannot_be_used_is_only_a_warning(self) -> None:
        found = cuda._absent(self.WHY, [], 2)
        assert found.status == "warn" and found.detail.startswith("2 GPUs found") and "[cuda]" in found.fix

    def test_a_pool_that_needs_it_fails(self) -> None:
        found = cuda._absent(self.WHY, ["big"], 0)
        assert found.status == "fail" and "pool big" in found.fix

    def test_this_machine(self, tmp_path: Path) -> None:
        found = cuda.checks(Config(), packages.version_of, tmp_path)
        assert found[0].name == "cuda" and found[0].status == "ok"


class TestCommand:
    def run(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
        code = main(["doctor", *arguments])
        out, err = capsys.readouterr()
        assert err == ""
        return code, out

    def test_json(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        endpoint = f"ipc://{tmp_path}/radixkv.sock"
        pools = ["--pool", "name=a,pages=2", "--pool", "name=b,pages=3,host_pages=4096,page_size=1"]
        code, out = self.run(capsys, "--json", *pools, "--endpoint", endpoint)
        found = json.loads(out)
        assert found["ok"] == (code == 0)
        assert code == 0
        checks = {check["name"]: check for check in found["checks"]}
        named = "pool a of 2 pages, pool b of 3 pages and 4,096 in its host tier"
        assert checks["configuration"]["detail"] == f"{named}; endpoint {endpoint}"
        assert checks["memory"]["detail"].startswith("the pools take 181.54 MiB, ")
        assert checks["daemon"]["status"] == "warn"
        known = {"memory", "open files", "sealed memory", "runtime directory", "packages", "torch", "cuda"}
        assert known <= set(checks)
        for check in checks.values():
            assert set(check) == {"name", "status", "detail", "fix"}
            assert (check["fix"] == "") == (check["status"] == "ok")

    def test_a_failure_is_exit_1_and_has_its_fix(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        code, out = self.run(capsys, "--endpoint", f"ipc://{tmp_path}/radixkv.sock")
        assert code == 1
        lines = out.splitlines()
        at = next(number for number, line in enumerate(lines) if line.startswith("fail"))
        assert lines[at].startswith("fail  runtime directory")
        assert lines[at + 1].strip().startswith("fix: ")

    def test_a_wrong_configuration_is_a_failed_check(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out = self.run(capsys, "--pool", "pages=0")
        assert code == 1
        assert out.startswith("fail  configuration  pool.pages = 0 is not allowed")

    def test_pools_larger_than_the_machine(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        endpoint = f"ipc://{tmp_path}/radixkv.sock"
        code, out = self.run(capsys, "--pool", "device_bytes=1000TiB", "--endpoint", endpoint)
        assert code == 1
        assert "fail  memory" in out

    def test_lines_are_aligned(self) -> None:
        text = as_lines([Check("a", "ok", "one"), Check("longer", "warn", "two", "mend")])
        assert text == "ok    a       one\nwarn  longer  two\n              fix: mend"
