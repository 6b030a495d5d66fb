"""The descriptor table as a reader sees it: it knows only the writes that left the core, in their order.

After each command it must tell the same story as the model: what the writes say is all that a later daemon will know.
"""

from __future__ import annotations

from fuzz.model.mismatch import expect, require
from fuzz.model.packing import unpack_pages
from fuzz.model.pool import CACHED, FREE, PRIVATE, QUARANTINED, SHADOW, PoolModel
from radixkv import commands


class TableMirror:
    """One record a page and pool: state, generation, owner, stamp, tokens; built from writes alone."""

    def __init__(self, pools: dict[str, int]) -> None:
        self.state = {name: [FREE] * pages for name, pages in pools.items()}
        self.generation = {name: [0] * pages for name, pages in pools.items()}
        self.owner = {name: [0] * pages for name, pages in pools.items()}
        self.stamp = {name: [0] * pages for name, pages in pools.items()}
        self.tokens = {name: [b""] * pages for name, pages in pools.items()}
        self.sessions: dict[int, tuple[int, int, bytes]] = {}

    def write(self, write: commands.Write) -> None:
        """Store one write. Raises Mismatch if a page cannot go from where it is to what the write says."""
        match write:
            case commands.Assign():
                for page in unpack_pages(write.pages):
                    self._move(write.pool, page, (FREE,), PRIVATE)
                    self.generation[write.pool][page] += 1
                    self.owner[write.pool][page] = write.owner
            case commands.Publish():
                self._publish(write)
            case commands.Retire():
                self._retire(write)
            case commands.Stamp():
                for page in unpack_pages(write.pages):
                    require("I7", self.state[write.pool][page] == CACHED, f"stamp of page {page}, which is not cached")
                    newer = write.stamp >= self.stamp[write.pool][page]
                    require("I7", newer, f"stamp of page {page} went back to {write.stamp}")
                    self.stamp[write.pool][page] = write.stamp
            case commands.Own():
                for page in unpack_pages(write.pages):
                    mutable = self.state[write.pool][page] in (PRIVATE, SHADOW)
                    require("I15", mutable, f"new owner of page {page}, which is {self.state[write.pool][page]}")
                    self.owner[write.pool][page] = write.owner
            case commands.SessionRecord():
                self.sessions[write.slot] = (write.session, write.epoch, write.token)
            case commands.NamespaceRecord():
                pass

    def _move(self, pool: str, page: int, allowed: tuple[str, ...], new: str) -> None:
        old = self.state[pool][page]
        require("I3", old in allowed, f"write turns page {page} of {pool} from {old} to {new}")
        self.state[pool][page] = new

    def _publish(self, write: commands.Publish) -> None:
        pages = unpack_pages(write.pages)
        each = len(write.tokens) // max(1, len(pages))
        expect("I5", "hashes of a publish", len(write.hashes), 16 * len(pages))
        expect("I5", "tokens of a publish", len(write.tokens) % max(1, len(pages)), 0)
        for index, page in enumerate(pages):
            self._move(write.pool, page, (PRIVATE,), SHADOW if write.shadow else CACHED)
            self.tokens[write.pool][page] = write.tokens[index * each : (index + 1) * each]

    def _retire(self, write: commands.Retire) -> None:
        for page in unpack_pages(write.pages):
            new = QUARANTINED if write.quarantined else FREE
            allowed = (PRIVATE, SHADOW) if write.quarantined else (PRIVATE, SHADOW, CACHED, QUARANTINED)
            self._move(write.pool, page, allowed, new)

    def compare(self, pool: PoolModel) -> None:
        """Raise Mismatch unless every page's record agrees with the model's."""
        for page, state in pool.state.items():
            expect("I1", f"record of page {page} of {pool.name}", self.state[pool.name][page], state)
            if state == CACHED:
                tokens = pool.key_of[page][2][-pool.page_size :]
                packed = b"".join(token.to_bytes(4, "little") for token in tokens)
                expect("I5", f"tokens in the record of page {page}", self.tokens[pool.name][page], packed)
