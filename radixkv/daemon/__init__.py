"""The daemon: one thread, one loop, one writer. This folder alone knows engine, ipc and device.

==================  =================================================================================================
``starting.py``     how it comes to be, cold or warm: endpoint, memory, engine, copier; all its ``parts.py``
``loop.py``         what is served in which order; signals and the end
``service.py``      one command to its end: engine, descriptor tables, then whoever is told
``attendance.py``   who is attached: what their connections and processes mean to the core, and the reverse
``agenda.py``       the time, and what is due when
``last_words.py``   what is said when a bug is found
==================  =================================================================================================
"""

from __future__ import annotations

from contextlib import ExitStack

from radixkv.config import Config
from radixkv.daemon.loop import Daemon
from radixkv.daemon.starting import RecoveryFailed, start
from radixkv.device.arena import MemoryInUse, MemoryTooSmall
from radixkv.errors import ConfigError, Exit, PermissionDenied, Unavailable
from radixkv.ipc.endpoint import EndpointInUse
from radixkv.ipc.log import open_log
from radixkv.ipc.refusals import is_known


def serve(config: Config, *, paranoid: bool = False, cold: bool = False) -> int:
    """Own the pools of ``config`` and answer workers until a signal ends it. Returns the process's exit code.

    ``cold``: begin with empty pools, whatever is in the store.
    """
    log, lines = open_log()
    try:
        with ExitStack() as stack:
            daemon = Daemon(start(stack, config, cold, log), paranoid, (log, lines))
            stack.callback(daemon.close)
            return daemon.run()
    except (ConfigError, PermissionDenied) as error:
        if not is_known(str(error)):
            log.critical("configuration refused", error=str(error))
        return Exit.CONFIG
    except (EndpointInUse, MemoryInUse) as error:
        log.critical("endpoint in use", error=str(error))
        return Exit.IN_USE
    except Unavailable as error:
        log.critical("no store", error=str(error))
        return Exit.NO_STORE
    except RecoveryFailed as error:
        log.critical("broken: this is a bug in radixkv; the next start is cold", error=str(error), exc_info=error)
        return Exit.BROKEN
    except MemoryTooSmall as error:
        log.critical("the memory cannot be had", error=error.message, **error.details)
        return Exit.MEMORY
