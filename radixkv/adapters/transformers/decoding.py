"""The decoding loop that ``model.generate`` calls in place of its own, once it has prepared everything.

``GenerationMixin.generate`` takes a callable as ``custom_generate``: it merges the generation configs, builds the
logits processors and stopping criteria, expands the prompts, and calls it as it would its own ``_sample``. So what is
chosen from the logits, and when it ends, is Transformers' own; only where keys and values lie is ours.

Rows end as they do there: with an end-of-text token, a row that is over is padded (and its pages go back at once);
without one, all rows go on until all are over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from radixkv.adapters.transformers.batch import PagedBatch

OnToken = Callable[[int, int], None]
"""Called with (row, token) as soon as a token is known; not for the padding after a row's end."""


def prompts_of(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    """Each row's tokens without its padding. Raises ValueError for padding on the right, for empty prompts, and for
    what is no batch of token ids or no mask of it."""
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        given = f"{list(input_ids.shape)} of {input_ids.dtype}"
        raise ValueError(f"input_ids are {given}; allowed: [rows, tokens] of integers")
    if input_ids.numel() == 0:
        raise ValueError("an empty prompt has no logits; allowed: 1 row of 1 token or more")
    if attention_mask is None:
        rows: list[list[int]] = input_ids.tolist()
        return rows
    if attention_mask.shape != input_ids.shape:
        masked = list(attention_mask.shape)
        raise ValueError(f"attention_mask is {masked}; allowed: {list(input_ids.shape)}, as input_ids")
    if not bool(attention_mask[:, -1].all()):
        raise ValueError("a prompt that ends in padding has no logits; allowed: padding on the left")
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


class Loop:
    """The state of one generation: token ids, which rows go on, what was recorded."""

    def __init__(self, input_ids: torch.Tensor, config: Any, processor: Any, criteria: Any) -> None:
        self.ids = input_ids
        self.going = torch.ones(len(input_ids), dtype=torch.bool)
        self._config = config
        self._processor = processor
        self._criteria = criteria
        self._padding = padding_of(config) if any(hasattr(each, "eos_token_id") for each in criteria) else None
        wanted = config.return_dict_in_generate
        self._scores: tuple[torch.Tensor, ...] | None = () if wanted and config.output_scores else None
        self._logits: tuple[torch.Tensor, ...] | None = () if wanted and config.output_logits else None

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token of each row, int64 [rows], from logits [rows, vocabulary]. They are part of ``ids`` now."""
        logits = logits.to(copy=True, dtype=torch.float32)
        scores = self._processor(self.ids, logits)
        if self._scores is not None:
            self._scores += (scores,)
        if self._logits is not None:
            self._logits += (logits,)
        if self._config.do_sample:
            tokens = torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = scores.argmax(dim=-1)
        if self._padding is not None:
            tokens = torch.where(self.going, tokens, self._padding)
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=-1)
        return tokens

    def is_over(self) -> bool:
        self.going = self.going & ~self._criteria(self.ids, self._scores)
        return not bool(self.going.any())

    @property
    def padded(self) -> torch.Tensor:
        """Which rows get padding from here on, bool [rows]."""
        return ~self.going if self._padding is not None else torch.zeros_like(self.going)

    def result(self) -> Any:
        if not self._config.return_dict_in_generate:
            return self.ids
        return GenerateDecoderOnlyOutput(sequences=self.ids, scores=self._scores, logits=self._logits)


def padding_of(config: Any) -> int | None:
    """The token id with which rows that are over are filled up: by default the first that ends a text."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    ends = config.eos_token_id
    if ends is None:
        return None
    return int(ends[0] if isinstance(ends, (list, tuple)) else ends)


def run(batch: PagedBatch, loop: Loop, streamer: Any, on_token: OnToken | None) -> Any:
    """Until all rows are over."""
    if streamer is not None:
        streamer.put(loop.ids)
    with batch:
        logits = batch.prefill()
        while True:
            padded = loop.padded
            tokens = loop.choose(logits)
            over = loop.is_over()
            if streamer is not None:
                streamer.put(tokens)
            if on_token is not None:
                for row, token in enumerate(_real(tokens, padded)):
                    if token is not None:
                        on_token(row, token)
            if over:
                break
            logits = batch.step(_real(tokens, loop.padded))
    if streamer is not None:
        streamer.end()
    return loop.result()


def _real(tokens: torch.Tensor, padded: torch.Tensor) -> list[int | None]:
    return [None if over else token for token, over in zip(tokens.tolist(), padded.tolist(), strict=True)]
