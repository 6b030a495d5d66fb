"""What a verb asks of the shell that runs it.

A verb is a generator: it yields an effect, gets the answer sent in (or an error thrown in), and returns its result. The
synchronous shell carries effects out with blocking calls; an asyncio shell would await them. No verb is written twice.

::

    verb                                     shell
      yield NeedSession()        ------>     wait until connected
                                 <------     Session
      yield Ask([Reserve(...)])  ------>     number, send, receive
                                 <------     [Reserved] or throw(Timeout)
      return Sequence
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from radixkv.client.batch import Outgoing, Part
from radixkv.client.outbox import Event
from radixkv.client.sequence import SequenceState
from radixkv.client.session import Session
from radixkv.commands import Body, Reply

T = TypeVar("T")


@dataclass(slots=True)
class NeedSession:
    """The session to work in; waits until there is one that is not away. Throws Unavailable.

    ``wait_s``: how much longer than the client's timeout.
    """

    wait_s: float = 0.0


@dataclass(slots=True)
class Ask:
    """Send these in order, in one round trip, behind what nobody waits for; gives their replies (``answers``).

    That is what the outbox has ready, and requests in doubt, which are asked again (``Core.envelop``).

    ``wait_s``: how much longer than the client's timeout the reply may take. Without parts: only those are sent.
    Throws Timeout, Unavailable; ``sent`` then says what may have been executed. Throws Away when the daemon went away
    and the next one may know the session: the same Ask then sends what was not answered (``asking.persist``).
    """

    session: Session
    parts: Sequence[Body | Part] = ()
    wait_s: float = 0.0
    alone: bool = False
    """Nothing else goes along."""
    sent: list[Outgoing] = field(default_factory=list)

    def answers(self) -> list[Reply]:
        return [out.reply for out in self.sent if out.reply is not None]


@dataclass(slots=True)
class Synchronize:
    """Wait for the device."""

    event: Event


@dataclass(slots=True)
class Linger:
    """Wait until the event is done (None: an instant), at most until a monotonic time (None: as long as it takes)."""

    event: Event | None
    until: float | None


@dataclass(slots=True)
class NeedQuiet:
    """Wait until nothing of this sequence is on its way any more. Throws Timeout."""

    seq: SequenceState


Effect = NeedSession | Ask | Synchronize | Linger | NeedQuiet
Verb: TypeAlias = Generator[Effect, Any, T]
