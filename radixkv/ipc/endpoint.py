"""Where a daemon is found: the files of an endpoint, who may use them, and who holds them.

::

    {dir}/radixkv.sock           ZeroMQ ROUTER
    {dir}/radixkv.sock.attach    attach socket
    {dir}/radixkv.sock.lock      locked by the daemon, or its keeper, as long as it lives, whatever its end
    {dir}/radixkv.sock.notify    where a keeper hears from its daemon

``dir``: $XDG_RUNTIME_DIR/radixkv, else /run/radixkv for root, else /tmp/radixkv-UID; $RADIXKV_ENDPOINT names another
socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from radixkv.config import SOCKET_PATH_MAX
from radixkv.errors import ConfigError, PermissionDenied, RadixKVError

SOCKET_NAME = "radixkv.sock"
BACKLOG = 256
"""Connections that may wait to be taken, also while no daemon runs and a keeper holds the socket."""

_LOCKS = Path("/proc/locks")
_DIRECTORY_MODE = 0o700
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class EndpointInUse(RadixKVError):
    """Another daemon answers here. Ends ``serve`` with exit 3, never crosses the wire."""

    code: ClassVar[str] = "endpoint_in_use"


@dataclass(frozen=True, slots=True)
class Endpoint:
    path: Path
    is_default: bool = False
    """True: the directory is radixkv's own."""

    @property
    def address(self) -> str:
        return f"ipc://{self.path}"

    @property
    def attach_path(self) -> Path:
        return self.path.with_name(self.path.name + ".attach")

    @property
    def lock_path(self) -> Path:
        return self.path.with_name(self.path.name + ".lock")

    @property
    def notify_path(self) -> Path:
        return self.path.with_name(self.path.name + ".notify")

    @property
    def directory(self) -> Path:
        return self.path.parent


def resolve(endpoint: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ) -> Endpoint:
    """The endpoint meant by a setting ("ipc://PATH" or a path; empty: the environment, then the default).

    Errors: ConfigError for what cannot be a unix socket's path.
    """
    if endpoint is not None and not isinstance(endpoint, str | os.PathLike):
        raise ConfigError(f"endpoint = {endpoint!r} is not allowed; allowed: ipc:// and an absolute path")
    named = os.fspath(endpoint or environ.get("RADIXKV_ENDPOINT", ""))
    if named:
        path = Path(named.removeprefix("ipc://"))
        if "://" in str(named).removeprefix("ipc://") or not path.is_absolute() or "\0" in str(path):
            raise ConfigError(f"endpoint = {named!r} is not allowed; allowed: ipc:// and an absolute path")
        found = Endpoint(path)
    else:
        found = Endpoint(_default_directory(environ) / SOCKET_NAME, is_default=True)
    length = len(os.fsencode(found.attach_path))
    if length > SOCKET_PATH_MAX:
        raise ConfigError(
            f"endpoint = {named or str(found.path)!r} is not allowed; allowed: at most {SOCKET_PATH_MAX} bytes for "
            f"{found.attach_path}, which has {length}; set RADIXKV_ENDPOINT to a shorter one"
        )
    return found


def _default_directory(environ: Mapping[str, str]) -> Path:
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_absolute():
        return Path(runtime) / "radixkv"
    if os.getuid() == 0:
        return Path("/run/radixkv")
    return Path(f"/tmp/radixkv-{os.getuid()}")  # noqa: S108 (its owner and mode are checked before use)


def check_directory(endpoint: Endpoint) -> None:
    """Refuse a directory in which somebody else could have put, or could replace, the sockets.

    Errors: PermissionDenied; FileNotFoundError if there is none.
    """
    directory = endpoint.directory
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PermissionDenied(f"{directory} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionDenied(f"{directory} is not a directory")
    if found.st_uid != os.getuid():
        raise PermissionDenied(f"{directory} belongs to uid {found.st_uid}, not to uid {os.getuid()}")
    if found.st_mode & _WRITABLE_BY_OTHERS and not found.st_mode & stat.S_ISVTX:
        raise PermissionDenied(f"{directory} is writable by other users: chmod 700 {directory}")


def prepare_directory(endpoint: Endpoint) -> None:
    """Create the directory (mode 0700), or check the one that is there.

    Errors: PermissionDenied.
    """
    directory = endpoint.directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=_DIRECTORY_MODE, exist_ok=True)
        check_directory(endpoint)
        if endpoint.is_default:
            directory.chmod(_DIRECTORY_MODE)
    except FileExistsError as error:
        raise PermissionDenied(f"{directory} is not a directory") from error
    except OSError as error:
        if isinstance(error, RadixKVError):
            raise
        raise PermissionDenied(f"{directory} cannot be used: {error.strerror}") from error


class Claim:
    """The right to serve at an endpoint, held until ``release`` or the end of the process, and the files there.

    A socket file left behind by a killed daemon is removed; one at which somebody listens is not.
    Errors: EndpointInUse, PermissionDenied, ConfigError.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.fd = _lock(endpoint)
        try:
            for path in self._sockets():
                remove_stale(path)
        except BaseException:
            self._let_go()
            raise

    @classmethod
    def inherit(cls, endpoint: Endpoint, fd: int) -> Claim:
        """The claim of an earlier process, whose lock this descriptor still holds.

        Takes the descriptor over. Errors: FileNotFoundError when the files are gone, and with them the claim.
        """
        if not _is_at(fd, endpoint.lock_path):
            os.close(fd)
            raise FileNotFoundError(endpoint.lock_path)
        claim = cls.__new__(cls)
        claim.endpoint, claim.fd = endpoint, fd
        return claim

    def leave(self) -> None:
        """Somebody else holds the lock as well and goes on: the files stay."""
        os.close(self.fd)
        self.fd = -1

    def release(self) -> None:
        """Remove the files. The lock file goes last, and while the lock is held: whoever opened it meanwhile sees that
        it is another one."""
        if self.fd >= 0:
            for path in self._sockets():
                path.unlink(missing_ok=True)
            self._let_go()

    def _let_go(self) -> None:
        self.endpoint.lock_path.unlink(missing_ok=True)
        os.close(self.fd)
        self.fd = -1

    def _sockets(self) -> tuple[Path, ...]:
        return (self.endpoint.path, self.endpoint.attach_path, self.endpoint.notify_path)


def open_socket(path: Path, kind: socket.SocketKind) -> socket.socket:
    """A unix socket at a path, mode 0600, that listens if its kind can. The endpoint must have been claimed before.

    Errors: PermissionDenied where nothing can be made, EndpointInUse where something is.
    """
    made = socket.socket(socket.AF_UNIX, kind)
    try:
        made.setblocking(False)
        with private_files():
            made.bind(os.fsencode(path))
        if kind is not socket.SOCK_DGRAM:
            made.listen(BACKLOG)
    except OSError as error:
        made.close()
        refusal = EndpointInUse if error.errno == errno.EADDRINUSE else PermissionDenied
        raise refusal(f"{path} cannot be bound: {error.strerror}") from error
    return made


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Sockets bound inside are for their owner alone, whatever the umask was."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _lock(endpoint: Endpoint) -> int:
    path = endpoint.lock_path
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise PermissionDenied(f"{path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise EndpointInUse(f"another daemon serves at {endpoint.address}") from None
        if _is_at(fd, path):
            return fd
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether this open file is still the one with that name."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), named)


def remove_stale(path: Path) -> None:
    """Make room for a socket. Errors: EndpointInUse (somebody listens), ConfigError (it is no socket)."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"endpoint: {path} exists and is not a socket; allowed: a path where nothing else is")
    if is_listening(path):
        raise EndpointInUse(f"somebody listens at {path}")
    path.unlink(missing_ok=True)


def is_claimed(endpoint: Endpoint) -> bool:
    """Whether a living process has the lock, as far as it can be seen from here (/proc/locks).

    It is not tried out: that would be in the way of a daemon that starts just then.
    """
    try:
        inode = str(endpoint.lock_path.stat().st_ino)
        held = [line.split() for line in _LOCKS.read_text().splitlines()]
    except OSError:
        return False
    return any("FLOCK" in words and inode in (word.rpartition(":")[2] for word in words) for words in held)


def is_listening(path: Path) -> bool:
    """Whether a connection to this unix socket would be taken."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.setblocking(False)
            code = probe.connect_ex(os.fsencode(path))
        if code in (0, errno.EAGAIN, errno.EINPROGRESS):
            return True
    return False
