"""radixkv's pages as vLLM's blocks: nothing is copied. In vLLM's scheduler.

vLLM hands blocks out from a queue of free ones. Here a prompt's blocks are the pages of a radixkv sequence, its
*lease*: the shared ones are shown to vLLM as computed blocks, and the others are put at the head of its queue while it
allocates for that request, and only then. Otherwise the queue holds blocks of the engine's own (``region.py``): they
are what a request gets that radixkv has no pages for, and what generated tokens go into.

::

    get_computed_blocks ── reserve ──> shared pages: computed           commit, when the prompt is complete
    allocate_slots ── the lease's other pages first ──> private pages   free, when the request is over

vLLM's cache manager is used by its attributes, which is why this file runs without vLLM. Three of its methods are
replaced on the object that vLLM gives to connectors (``bind_kv_cache_manager``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from radixkv.adapters.vllm.blocks import TOKEN_BYTES, full_blocks, usable_blocks
from radixkv.adapters.vllm.door import Door
from radixkv.adapters.vllm.namespace import Namespaces
from radixkv.client.namespace import Namespace
from radixkv.client.sync import Pool, Sequence
from radixkv.client.tokens import pack
from radixkv.errors import StaleHandle


@dataclass(slots=True, eq=False)
class Lease:
    """tokens: of the prompt, packed. blocks: vLLM's, one a page.
    shared: the first so many are complete, and never written.
    held: of so many vLLM's count of references is one higher, so that they never look free.
    """

    request: Any
    seq: Sequence
    namespace: Namespace
    tokens: bytes
    blocks: list[Any]
    shared: int
    held: int = 0


@dataclass(slots=True)
class Place:
    """Where an arena lies among vLLM's blocks: its page 0 is block ``first``.

    memory: the arena. move: puts another one of the same size there.
    """

    memory: Any
    first: int
    move: Callable[[Any], None]


class Leases:
    """All that one engine holds. ``manager``: vLLM's KVCacheManager, just made: no block is used yet."""

    def __init__(self, door: Door, namespaces: Namespaces, place: Place, manager: Any) -> None:
        self._door = door
        self._namespaces = namespaces
        self._place = place
        self._size = door.settings.spec.page_size
        self._leases: dict[str, Lease] = {}
        self._ending: list[tuple[Sequence, int]] = []
        self._manager = manager
        self._pool = manager.block_pool
        self._computed_blocks, manager.get_computed_blocks = manager.get_computed_blocks, self.computed_blocks
        self._allocate_slots, manager.allocate_slots = manager.allocate_slots, self.allocate_slots
        self._free_blocks, self._pool.free_blocks = self._pool.free_blocks, self.free_blocks
        for block in self._pool.blocks[place.first :]:
            self._pool.free_block_queue.remove(block)

    @property
    def count(self) -> int:
        return len(self._leases)

    def waits(self, request: Any) -> bool:
        """Whether a request that could be scheduled had better wait: another one of this engine is computing, right
        now, more than half of either's prompt. A request that waits has no pages."""
        lease = self._leases.get(request.request_id)
        if lease is None or not any(self._computes_for(other, lease) for other in self._leases.values()):
            return False
        self._let_go(self._leases.pop(request.request_id))
        return True

    # -- instead of vLLM's --------------------------------------------------------------------------------------------

    def computed_blocks(self, request: Any) -> tuple[Any, int, int]:
        """What is computed of a request that is to be scheduled. vLLM may ask several times."""
        self._publish()
        lease = self._lease(request)
        if lease is None:
            found = self._computed_blocks(request)
            # What another request's lease has may go with it.
            leased = any(self._is_page(block) for group in found[0].blocks for block in group)
            return (self._manager.empty_kv_cache_blocks, 0, 0) if leased else found
        hits = min(lease.shared, usable_blocks(request.num_tokens, self._size))
        for block in lease.blocks[lease.held : hits]:
            block.ref_cnt += 1
        lease.held = max(lease.held, hits)
        return self._manager.create_kv_cache_blocks((lease.blocks[:hits],)), hits * self._size, 0

    def allocate_slots(self, request: Any, *arguments: Any, **keywords: Any) -> Any:
        """None makes vLLM preempt a running request whose pages are not its own any more; later it is computed."""
        lease = self._leases.get(request.request_id)
        if lease is None:
            return self._allocate_slots(request, *arguments, **keywords)
        if not lease.seq.valid():
            return None
        ready = [block for block in lease.blocks[lease.shared :] if block.ref_cnt == 0]
        queue = self._pool.free_block_queue
        queue.prepend_n(ready)
        try:
            return self._allocate_slots(request, *arguments, **keywords)
        finally:
            for block in ready:
                if block.ref_cnt == 0:
                    queue.remove(block)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Pages do not become free for others in vLLM, nor are they found by its own cache."""
        blocks = list(ordered_blocks)
        self._free_blocks(blocks)
        for block in blocks:
            if self._is_page(block) and block.ref_cnt == 0:
                self._pool.free_block_queue.remove(block)
                self._pool._maybe_evict_cached_block(block)

    # -- vLLM's steps -------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Before each step, when all earlier ones are done."""
        self._publish()
        self._end_some()

    def lost_blocks(self) -> set[int]:
        """After a step: blocks whose pages were taken from us, and so what was computed with them."""
        return {
            block.block_id
            for lease in self._leases.values()
            if not lease.seq.valid()
            for block in lease.blocks
            if block.ref_cnt
        }

    def finished(self, request_id: str) -> None:
        """The request is over, well or not; vLLM frees its blocks next."""
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self._let_go(lease)
            self._end_some()

    # -- leases -------------------------------------------------------------------------------------------------------

    def _lease(self, request: Any) -> Lease | None:
        """None: there are no pages for it, or it is not cached."""
        lease = self._leases.get(request.request_id)
        if lease is not None and not lease.seq.valid():
            self._let_go(self._leases.pop(request.request_id))
            lease = None
        if lease is None and self._may_be_cached(request):
            tokens = pack(request.prompt_token_ids)
            namespace = self._namespaces.of(request)

            def reserve(pool: Pool) -> Sequence:
                seq = pool.reserve(tokens, namespace=namespace, last_page="drop")
                if seq.memory is not self._place.memory and not self._moved(seq.memory):
                    with seq:
                        raise StaleHandle("the daemon has other memory now, and the former is still in use")
                return seq

            seq = self._door.ask("reserve", reserve)
            if seq is not None:
                blocks = [self._pool.blocks[self._place.first + int(page)] for page in seq.page_table]
                lease = Lease(request, seq, namespace, tokens, blocks, seq.writable_from_tokens // self._size)
                self._leases[request.request_id] = lease
        return lease

    def _moved(self, memory: Any) -> bool:
        """A daemon with new memory: it takes the place of the former when nobody has pages of that."""
        if self._leases or memory.pages != self._place.memory.pages:
            return False
        self._place.move(memory)
        self._place.memory = memory
        return True

    def _publish(self) -> None:
        """The prompts that the steps so far have completed."""
        for lease in self._leases.values():
            full = self._complete(lease)
            if full > lease.shared:
                self._commit(lease, full)

    def _computes_for(self, other: Lease, lease: Lease) -> bool:
        """Whether what ``other`` computes is worth waiting for."""
        full = full_blocks(other.request.num_prompt_tokens, self._size)
        usable = usable_blocks(lease.request.num_prompt_tokens, self._size)
        needed = max(lease.shared, max(full, usable) // 2) + 1
        if other is lease or needed > min(full, usable) or other.namespace != lease.namespace:
            return False
        computing = other.shared < full and other.blocks[other.shared].ref_cnt > 0
        common = needed * self._size * TOKEN_BYTES
        return computing and other.tokens[:common] == lease.tokens[:common]

    def _may_be_cached(self, request: Any) -> bool:
        tokens = request.prompt_token_ids
        return bool(tokens) and request.prompt_embeds is None and not request.skip_reading_prefix_cache

    def _complete(self, lease: Lease) -> int:
        """Blocks of the prompt, if all are computed; what is shared already, if not."""
        full = full_blocks(lease.request.num_prompt_tokens, self._size)
        return full if lease.request.num_computed_tokens >= full * self._size else lease.shared

    def _commit(self, lease: Lease, blocks: int) -> None:
        def commit(_: Pool) -> bool:
            lease.seq.commit(blocks * self._size)
            return True

        if self._door.ask("commit", commit):
            lease.shared = blocks

    def _let_go(self, lease: Lease) -> None:
        for block in lease.blocks[: lease.held]:
            block.ref_cnt -= 1
        full = self._complete(lease)
        self._ending.append((lease.seq, full * self._size if full > lease.shared else 0))

    def _end_some(self) -> None:
        """Give back what is over. What a daemon that is not asked at present has to wait for is tried again."""
        for seq, commit in self._ending:
            self._door.ask("free", lambda _, seq=seq, commit=commit: seq.free(commit=commit))  # type: ignore[misc]
        self._ending = [(seq, commit) for seq, commit in self._ending if not is_over(seq)]

    def _is_page(self, block: Any) -> bool:
        return bool(block.block_id >= self._place.first)


def is_over(seq: Sequence) -> bool:
    """Given back, or taken."""
    return bool(seq.closed or seq.lost or seq.session.over)
