"""One worker process of the demo: a real model that decodes from the daemon's pages.

It reads one JSON object a line from stdin and writes one a line to stdout::

    {"ask": id, "question": text, "endless": bool}        -> start, prefill..., token..., done    through shared pages
    {"reference": id, "question": text, "endless": bool}  -> the same           nothing shared, everything computed

or ``refused`` in place of what cannot be done. endless: go on after the end of the text, to the last token allowed, so
that every answer has a middle. Started as ``python -m radixkv.demo.worker`` with a first line {"endpoint", "document",
"max_new_tokens", "kv_dtype"}; its end of input is its end.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from typing import Any

import torch
from transformers import DynamicCache

import radixkv
from radixkv.adapters import smollm2
from radixkv.adapters.transformers import Generation, PagedModel
from radixkv.adapters.transformers.model import end_of_text
from radixkv.config import QUANTIZED

CHUNK_TOKENS = 512
PAGE_TABLE_HEAD = 4
TIMEOUT_S = 30.0
"""For a daemon's answer; in the middle of it one may be killed and another one started."""
TEMPLATE = "Text:\n\n{document}\n\nUse the text to answer this question: {question}"
"""The document comes first, so that all questions about it have it as their common prefix."""


class TooLong(Exception):
    """The document is longer than the model's context."""


def say(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class Worker:
    """A model, its tokenizer, and a pool of the daemon."""

    def __init__(self, setup: dict[str, Any], client: radixkv.Client) -> None:
        self.document: str = setup["document"]
        self.max_new_tokens: int = setup["max_new_tokens"]
        self.model, self.tokenizer = smollm2.load()
        namespace = radixkv.Namespace(**smollm2.namespace_fields())
        self.paged = PagedModel(self.model, client.pool("default"), namespace)
        quantized = setup["kv_dtype"] in QUANTIZED
        self.alone = PagedModel(self.model, kv_dtype=setup["kv_dtype"]) if quantized else None
        self.stop = end_of_text(self.model)
        # The weights are read from disk by the first forward; that belongs to loading, not to the first answer.
        self._plain_forward([0], DynamicCache())

    def prompt(self, question: str) -> list[int]:
        text = TEMPLATE.format(document=self.document, question=question)
        message = [{"role": "user", "content": text}]
        encoded = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        tokens: list[int] = encoded["input_ids"]
        longest = self.model.config.max_position_embeddings - self.max_new_tokens
        if len(tokens) > longest:
            raise TooLong(f"the prompt has {len(tokens)} tokens, this model takes at most {longest}")
        return tokens

    def ask(self, request: str, question: str, endless: bool) -> None:
        """Answer through the shared pages."""
        tokens = self.prompt(question)
        say(event="start", id=request, prompt=tokens)
        answer = self._greedy(self.paged, request, tokens, endless)
        say(
            event="done",
            id=request,
            cached_tokens=answer.cached_tokens,
            computed_tokens=answer.computed_tokens,
            page_table_head=answer.page_table[:PAGE_TABLE_HEAD],
            ttft_s=answer.ttft_s,
            tokens=answer.tokens,
            output=self._text(answer.tokens),
            shared=answer.shared,
            recoveries=answer.recoveries,
        )

    def reference(self, request: str, question: str, endless: bool) -> None:
        """Answer the same question with Transformers alone: its own cache, its own attention, everything computed.

        What quantized pages say is compared with quantized pages of this process alone.
        """
        tokens = self.prompt(question)
        say(event="start", id=request, prompt=tokens)
        if self.alone is not None:
            answer = self._greedy(self.alone, request, tokens, endless)
            say(event="done", id=request, ttft_s=answer.ttft_s, tokens=answer.tokens, output=self._text(answer.tokens))
            return
        started = time.monotonic()
        cache = DynamicCache()
        for begin in range(0, len(tokens), CHUNK_TOKENS):
            end = min(begin + CHUNK_TOKENS, len(tokens))
            token = self._plain_forward(tokens[begin:end], cache)
            say(event="prefill", id=request, done=end, total=len(tokens))
        ttft_s = time.monotonic() - started
        output = [token]
        self._token(request, token)
        while (endless or token not in self.stop) and len(output) < self.max_new_tokens:
            token = self._plain_forward([token], cache)
            output.append(token)
            self._token(request, token)
        say(event="done", id=request, ttft_s=ttft_s, tokens=output, output=self._text(output))

    def _greedy(self, paged: PagedModel, request: str, tokens: list[int], endless: bool) -> Generation:
        return paged.greedy(
            tokens,
            self.max_new_tokens,
            stop=() if endless else self.stop,
            on_token=lambda token: self._token(request, token),
            on_prefill=lambda done, total: say(event="prefill", id=request, done=done, total=total),
        )

    def _plain_forward(self, tokens: list[int], cache: DynamicCache) -> int:
        with torch.inference_mode():
            output = self.model(input_ids=torch.tensor([tokens]), past_key_values=cache, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    def _token(self, request: str, token: int) -> None:
        say(event="token", id=request, text=self._text([token]))

    def _text(self, tokens: list[int]) -> str:
        """Up to the end of the text, if there is one."""
        said = list(itertools.takewhile(lambda token: token not in self.stop, tokens))
        text: str = self.tokenizer.decode(said, skip_special_tokens=True)
        return text


def main() -> int:
    torch.set_num_threads(1)  # two threads are slower for a model this small, and another worker wants the other core
    setup = json.loads(sys.stdin.readline())
    with radixkv.connect(setup["endpoint"], timeout=TIMEOUT_S) as client:
        worker = Worker(setup, client)
        say(event="ready", pid=os.getpid())
        for line in sys.stdin:
            order = json.loads(line)
            try:
                if "ask" in order:
                    worker.ask(order["ask"], order["question"], order["endless"])
                else:
                    worker.reference(order["reference"], order["question"], order["endless"])
            except (TooLong, radixkv.OutOfPages) as error:
                say(event="refused", message=str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
