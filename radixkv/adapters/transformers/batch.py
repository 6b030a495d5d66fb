"""Several sequences of one model at once: prompts one after the other, then one forward a step for all of them.

A prompt is committed before the next one is reserved, so rows share what they have in common, with each other as with
everybody else. From then on a row is a ``PagedSequence`` as any other; only its last token is computed beside those of
the other rows. A row that lost its pages computes by itself what is missing and is back in the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

import torch

from radixkv.adapters.transformers.batch_cache import BatchCache, RowGroup, by_memory
from radixkv.adapters.transformers.cache import PagedCache
from radixkv.adapters.transformers.sequence import PagedSequence, Settings
from radixkv.errors import SessionLost, Timeout, Unavailable

SILENT = (SessionLost, Timeout, Unavailable)
"""Why a reserve failed, when it says that the daemon will not serve the other rows either."""


class PagedBatch:
    """Prompts, each with room for ``max_new_tokens`` more. Use it in a ``with`` block, as ``PagedSequence``.

    ``rows`` are the sequences. What ``PagedSequence`` raises, this raises, for the row that it happens to.
    """

    def __init__(self, settings: Settings, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        self.rows: list[PagedSequence] = []
        self._settings = settings
        self._prompts = prompts
        self._max_new_tokens = max_new_tokens
        self._open = ExitStack()
        self._caches: list[PagedCache] = []
        self._groups: list[RowGroup] = []

    def prefill(self) -> torch.Tensor:
        """Reserve and compute the prompts; logits [rows, vocabulary] for what follows each. Call it once, first."""
        logits = []
        for prompt in self._prompts:
            row = PagedSequence(self._settings, prompt, self._max_new_tokens)
            self.rows.append(self._open.enter_context(row))
            logits.append(row.logits())
            self._heed(row)
        return torch.stack(logits)

    def step(self, tokens: Sequence[int | None]) -> torch.Tensor:
        """Append a token to each row; logits [rows, vocabulary] for what follows it.

        None: the row is over. Its pages go back now, and its logits are zeros.
        """
        going = []
        for row, token in zip(self.rows, tokens, strict=True):
            if token is None:
                row.close()
            else:
                row.append(token)
                going.append(row)
        found = self._together(going)
        for row in going:
            if row not in found:
                found[row] = row.logits()
                self._heed(row)
        empty = torch.zeros_like(found[going[0]]) if going else torch.empty(0)
        return torch.stack([found.get(row, empty) for row in self.rows])

    def __enter__(self) -> PagedBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def _together(self, going: Sequence[PagedSequence]) -> dict[PagedSequence, torch.Tensor]:
        """Logits of the rows that could be computed in one forward, and whose pages were still theirs after it."""
        ready = [row for row in going if self._ask(row, row.ready)]
        ready = [row for row in ready if row.next_alone]  # a later row may have found the daemon lost
        if not ready:
            return {}
        logits = self._forward(ready)
        return {row: each for row, each in zip(ready, logits, strict=True) if self._ask(row, row.settle)}

    def _forward(self, rows: Sequence[PagedSequence]) -> torch.Tensor:
        caches = [row.cache for row in rows]
        if caches != self._caches:  # rows came, went, or have other pages than before
            self._caches, self._groups = caches, by_memory(caches)
        cache = BatchCache(self._groups)
        with torch.inference_mode():
            output = self._settings.model(
                input_ids=torch.tensor([row.tokens[-1:] for row in rows]),
                position_ids=torch.tensor([[row.written] for row in rows]),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        cache.check()
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _ask(self, row: PagedSequence, question: Callable[[], bool]) -> bool:
        answer = question()
        if not answer:
            self._heed(row)
        return answer

    def _heed(self, row: PagedSequence) -> None:
        """If a row found the daemon lost, no other row waits for an answer to find out for itself."""
        if not isinstance(row.refusal, SILENT) or self._settings.reservation is None:
            return
        self._settings = replace(self._settings, reservation=None)
        for other in self.rows:
            if other.shared and not other.closed:
                other.leave()
