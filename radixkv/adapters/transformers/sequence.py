"""Tokens in, logits out, over pages: compute what is missing, publish what is complete, recover from what is lost.

The life of a sequence::

    reserve ─> written = cached_tokens ─> forward over tokens[written:] ─> valid? ─> publish ─> logits
       ^                                        |                           |         |
       └──────────── lost: the pages, the session or the daemon ────────────┴─────────┘

After a loss everything known so far is reserved again, by then mostly cached, or, without a daemon, computed in local
pages. Since the model sees the same tokens at the same positions, the output is that of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from radixkv.adapters.transformers.cache import PagedCache
from radixkv.adapters.transformers.pages import LocalPages, Pages, Reservation, SharedPages
from radixkv.config import KVSpec
from radixkv.errors import Draining, RadixKVError, SessionLost, StaleHandle, Timeout, Unavailable

LOST = (SessionLost, StaleHandle, Unavailable, Timeout, Draining)
"""What says that the pages, or the daemon behind them, cannot be counted on any longer."""

RECOVERIES_MAX = 3
"""After so many losses of one sequence it stays in local pages: something keeps taking the shared ones away."""

HANDOFF_TTL_S = 30.0
"""How long a sequence that was handed off waits to be adopted."""

OnPrefill = Callable[[int, int], None]
"""Called with (tokens whose keys and values are there, tokens in all) as a prompt is computed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How sequences of one model run.

    reservation: None for local pages. survives: the errors after which a sequence goes on; none: it hands them on.
    chunk_tokens: most tokens a forward sees at once.
    """

    model: Any
    spec: KVSpec
    reservation: Reservation | None
    survives: tuple[type[RadixKVError], ...]
    chunk_tokens: int


class PagedSequence:
    """One sequence of one model. Leaving a ``with`` block publishes what is complete and gives the pages back.

    Attributes: tokens (known so far), written (leading tokens whose keys and values are in the pages), cached_tokens
    (of the first reserve), computed_tokens (that forward has seen so far), recoveries (how often pages were lost),
    refusal (why the last reserve gave no pages of the daemon, or None), cache (what the pages are to Transformers).
    """

    _pages: Pages
    cache: PagedCache
    written: int

    def __init__(
        self, settings: Settings, tokens: Sequence[int], max_new_tokens: int, adopted: SharedPages | None = None
    ) -> None:
        """Reserve pages for ``tokens``, unless there are adopted ones. Raises ValueError for an empty prompt,
        OutOfPages, and, with on_lost="raise", what the client raises when there is no daemon."""
        if len(tokens) == 0:
            raise ValueError("an empty prompt has no logits; allowed: 1 token or more")
        self._settings = settings
        self._limit = len(tokens) + max_new_tokens
        self._closed = False
        self.tokens = [int(token) for token in tokens]
        self.computed_tokens = 0
        self.recoveries = 0
        self.refusal: RadixKVError | None = None
        self._take(adopted or self._reserve())
        self.cached_tokens = self._pages.cached_tokens

    @property
    def shared(self) -> bool:
        """Whether the pages are the daemon's. False: local, because there is no daemon."""
        return self._pages.shared

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def next_alone(self) -> bool:
        """Whether the last token is all that is missing."""
        return self.written == len(self.tokens) - 1

    @property
    def page_table(self) -> list[int]:
        return [int(page) for page in self._pages.page_table]

    def append(self, token: int) -> None:
        """One more token is known. It is computed by the next ``logits``. Raises ValueError beyond max_new_tokens."""
        if len(self.tokens) >= self._limit:
            raise ValueError(f"the sequence was opened for {self._limit} tokens")
        self.tokens.append(int(token))

    def logits(self, on_prefill: OnPrefill | None = None) -> torch.Tensor:
        """Logits [vocabulary] for what follows the last token; computes the tokens that are not in the pages yet.

        Raises OutOfPages; with on_lost="raise" also SessionLost, StaleHandle, Unavailable, Timeout and Draining.
        """
        while True:
            try:
                return self._compute(on_prefill)
            except self._settings.survives as error:
                self._recover(error)

    def ready(self) -> bool:
        """May the next forward of a batch compute the last token here? False: not before ``logits`` has been asked,
        as more than one token is missing, perhaps because the pages were just lost. Raises what ``logits`` raises."""
        return self.next_alone and self._survives(lambda: self._pages.make_room(self.tokens, 0))

    def settle(self) -> bool:
        """The last token was computed by a batch's forward: publish it. False: what came out must not be used, ask
        ``logits``; the pages were lost. Raises what ``logits`` raises."""
        if not self.next_alone:
            return False
        self.computed_tokens += 1
        return self._survives(lambda: self._accept(len(self.tokens)))

    def leave(self) -> None:
        """Go on in local pages, and ask the daemon for nothing any more: somebody else has found it lost."""
        self._settings = replace(self._settings, reservation=None)
        self.recoveries += 1
        self._pages.abandon()
        self._take(self._reserve())

    def handoff(self, ttl_s: float = HANDOFF_TTL_S) -> bytes:
        """A ticket by which ``PagedModel.adopt``, in whatever process, goes on from here; this sequence is over.

        Tokens that were appended and not computed go along; the adopter computes them. Raises ValueError in local
        pages, OutOfPages, and what the client raises when pages, session or daemon are lost: then nothing has been
        handed off, and whoever was to go on needs the tokens instead.
        """
        if not isinstance(self._pages, SharedPages):
            raise ValueError("local pages cannot be handed off; allowed: pages of a daemon")  # noqa: TRY004
        ticket = self._pages.handoff(self.tokens, self.written, ttl_s)
        self._closed = True
        return ticket

    def close(self, *, publish: bool = True) -> None:
        """Give the pages back; what is complete stays cached for others. Twice is once."""
        if self._closed:
            return
        self._closed = True
        try:
            if publish:
                self._pages.finish(self.tokens, self.written)
        except self._settings.survives:
            return  # it stays uncached for others
        finally:
            self._pages.release()

    def __enter__(self) -> PagedSequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(publish=kind is None)

    def _take(self, pages: Pages) -> None:
        self._pages = pages
        self.written = pages.cached_tokens
        self.cache = PagedCache(pages, seen=self.written)

    def _reserve(self) -> Pages:
        settings = self._settings
        if settings.reservation is not None and self.recoveries <= RECOVERIES_MAX:
            try:
                return SharedPages.reserve(settings.reservation, self.tokens, self._headroom())
            except settings.survives as error:
                self.refusal = error
        return LocalPages(settings.spec, self._limit)

    def _headroom(self) -> int:
        """Tokens of room to keep ahead: one page, or less near the end."""
        return min(self._settings.spec.page_size, self._limit - len(self.tokens))

    def _compute(self, on_prefill: OnPrefill | None) -> torch.Tensor:
        total = len(self.tokens)
        logits: torch.Tensor | None = None
        self._pages.make_room(self.tokens, 0)
        while self.written < total:
            end = min(total, self.written + self._settings.chunk_tokens)
            logits = self._forward(self.tokens[self.written : end])
            self._accept(end)
            if on_prefill is not None:
                on_prefill(self.written, total)
        if logits is None:
            raise ValueError("the logits after these tokens were given already; append a token first")
        return logits

    def _accept(self, end: int) -> None:
        """Keys and values of the tokens up to ``end`` have been computed."""
        # The pages may have been taken from us (a lapsed session, a restarted daemon) while we computed.
        if not self._pages.valid():
            raise SessionLost("pages of the sequence were given to another one")
        self.written = end
        self._pages.publish(self.tokens, self.written, self._headroom())

    def _survives(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except self._settings.survives as error:
            self._recover(error)
            return False
        return True

    def _recover(self, error: RadixKVError) -> None:
        if not self.shared:
            raise error
        self.recoveries += 1
        self._pages.abandon()
        self._take(self._reserve())

    def _forward(self, tokens: list[int]) -> torch.Tensor:
        self.computed_tokens += len(tokens)
        with torch.inference_mode():
            output = self._settings.model(
                input_ids=torch.tensor([tokens]), past_key_values=self.cache, use_cache=True, logits_to_keep=1
            )
        self.cache.check(self.written + len(tokens))
        logits: torch.Tensor = output.logits[0, -1]
        return logits
