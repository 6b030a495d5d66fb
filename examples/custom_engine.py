"""A serving engine: continuous batching over radixkv pages, shared-prefix decode, speculative verification.

A small random model: start a daemon first, with
`radixkv serve --pool name=default,layers=2,kv_heads=2,head_dim=16,dtype=float32,page_size=4,pages=64`.
The demo's model: `radixkv serve`, then `python examples/custom_engine.py smollm2`.

Read `Engine.step` first, then what it calls. To make it yours: another model around `attend`, your sampling in
`verify`, your guesses in `guess`, your order of admission in `admit`.
"""

import sys
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear, rms_norm, silu
from torch.nn.utils.rnn import pad_sequence

import radixkv
from radixkv.kernels import Rotary, append, decode_attention, group_prefixes, prefill_attention

ROWS = 4  # requests that are computed together
GUESSES = 3  # tokens guessed ahead of each: one forward checks them all and keeps those that are right
STEP = 1 + GUESSES  # new tokens of a row in each decode step
LOST = (radixkv.StaleHandle, radixkv.SessionLost, radixkv.Unavailable, radixkv.Timeout)


class Llama:
    """Weights under their usual names. What came before the tokens it is given only `attend` knows."""

    def __init__(self, weights, head_dim, inverse_frequencies, epsilon=1e-5):
        self.weights, self.head_dim, self.epsilon = weights, head_dim, epsilon
        angles = torch.outer(torch.arange(8192.0), inverse_frequencies)
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, tokens, attend):
        """tokens [n] -> hidden states [n, width]."""
        hidden = self.weights["model.embed_tokens.weight"][tokens]
        layer = 0
        while f"model.layers.{layer}.input_layernorm.weight" in self.weights:
            normed = self.norm(hidden, f"layers.{layer}.input_layernorm")
            q, k, v = (
                linear(normed, self.of(layer, f"self_attn.{x}_proj")).unflatten(1, (-1, self.head_dim)) for x in "qkv"
            )
            hidden = hidden + linear(attend(layer, q, k, v).flatten(1), self.of(layer, "self_attn.o_proj"))
            normed = self.norm(hidden, f"layers.{layer}.post_attention_layernorm")
            gate = silu(linear(normed, self.of(layer, "mlp.gate_proj")))
            gated = gate * linear(normed, self.of(layer, "mlp.up_proj"))
            hidden = hidden + linear(gated, self.of(layer, "mlp.down_proj"))
            layer += 1
        return hidden

    def best(self, hidden):
        """The likeliest next token after each."""
        return linear(self.norm(hidden, "norm"), self.weights["model.embed_tokens.weight"]).argmax(-1).tolist()

    def of(self, layer, name):
        return self.weights[f"model.layers.{layer}.{name}.weight"]

    def norm(self, hidden, name):
        return rms_norm(hidden, hidden.shape[-1:], self.weights[f"model.{name}.weight"], self.epsilon)


@dataclass(eq=False)
class Request:
    tokens: list  # the prompt, and behind it what was generated
    until: int  # so many tokens it may have
    stop: int = -1  # or it ends with this one
    seq: radixkv.Sequence | None = None  # its pages, while it is in the batch

    def __post_init__(self):
        self.prompt = len(self.tokens)

    @property
    def over(self):
        return len(self.tokens) >= self.until or self.tokens[self.prompt :][-1:] == [self.stop]

    @property
    def written(self):
        """Keys and values of so many tokens are in its pages: of all but the newest."""
        return len(self.tokens) - 1

    def take(self, tokens):
        for token in tokens:
            if not self.over:
                self.tokens.append(token)


class Engine:
    def __init__(self, model, pool, namespace):
        self.model, self.pool, self.namespace = model, pool, namespace
        self.waiting, self.batch = deque(), []
        self.groups = None  # which rows read the same pages; None: to be made anew, the rows have changed
        self.counts = Counter()

    def run(self, requests):
        self.waiting.extend(requests)
        while self.waiting or self.batch:
            self.step()

    def step(self):
        try:
            self.admit()
            self.make_room()
            self.verify()
            self.retire()
        except LOST:  # a lapsed lease, another daemon: what was computed and not committed is computed again
            for row in list(self.batch):
                self.put_back(row)

    def admit(self):
        """Rows join the batch at any step, each after its prompt was computed but for the cached prefix."""
        while self.waiting and len(self.batch) < ROWS:
            row = self.waiting[0]
            if row.over:  # nothing to do, or put back with its last token
                self.waiting.popleft()
                continue
            wait_s = None if self.batch else 30  # a batch of nobody can but wait for pages of other workers
            try:
                row.seq = self.pool.reserve(row.tokens, namespace=self.namespace, headroom_tokens=STEP, timeout=wait_s)
            except radixkv.OutOfPages:
                if self.batch:
                    break
                raise
            self.batch.append(self.waiting.popleft())
            self.groups = None
            cached = row.seq.cached_tokens
            self.counts["cached"] += cached
            first = self.model.best(self.forward([row], [cached], [row.tokens[cached:]], decode=False)[-1:])
            if row.seq.valid():
                row.seq.commit(row.seq.length)  # before the next is admitted, which may begin alike
                row.take(first)
            else:  # its pages were taken from us meanwhile, so this means nothing
                self.put_back(row)

    def make_room(self):
        """Once a page, in one message for all rows: commit what is known, tell what is new, have room for a step."""
        short = [row for row in self.batch if row.written + STEP > row.seq.capacity_tokens]
        if not short:
            return
        done = self.pool.step(
            commit={row.seq: row.seq.length for row in short},
            extend={row.seq: (row.tokens[row.seq.length : row.written], STEP) for row in short},
        )
        for row in short:
            if done.commit[row.seq] or done.extend[row.seq]:  # an exception, such as OutOfPages: the others go first
                self.put_back(row)

    def verify(self):
        """One forward for all rows: the newest token of each, and behind it the guesses that follow."""
        if not self.batch:
            return
        for row in [row for row in self.batch if row.seq.memory is not self.batch[-1].seq.memory]:
            self.put_back(row)  # of a daemon before that of the row that came last
        guesses = [guess(row.tokens) for row in self.batch]
        news = [[row.tokens[-1], *guessed] for row, guessed in zip(self.batch, guesses, strict=True)]
        best = self.model.best(self.forward(self.batch, [row.written for row in self.batch], news, decode=True))
        self.counts["steps"] += 1
        for place, (row, guessed) in enumerate(zip(list(self.batch), guesses, strict=True)):
            if not row.seq.valid():
                self.put_back(row)
                continue
            mine = best[place * STEP : (place + 1) * STEP]  # after the newest token, after the first guess, ...
            right = next((n for n in range(GUESSES) if guessed[n] != mine[n]), GUESSES)
            row.take(mine[: right + 1])  # what wrong guesses have left in the pages will be written over
            self.counts["right guesses"] += right

    def retire(self):
        for row in [row for row in self.batch if row.over]:
            self.batch.remove(row)
            self.groups = None
            with suppress(*LOST):  # then it is not cached for the next, that is all
                row.seq.extend(row.tokens[row.seq.length : row.written])
                row.seq.free(commit=row.written)  # full pages stay cached, the others go back

    def put_back(self, row):
        """To the head of the queue, with all tokens it has. Most of what it had written is cached."""
        self.counts["put back"] += 1
        self.batch.remove(row)
        self.waiting.appendleft(row)
        self.groups = None
        with suppress(radixkv.RadixKVError):
            row.seq.free()

    def forward(self, rows, firsts, news, *, decode):
        """Hidden states of the rows' new tokens, the first of which stand at `firsts`. They are in the pages then."""
        table = pad_sequence([torch.tensor(row.seq.page_table) for row in rows], batch_first=True, padding_value=-1)
        counts = torch.tensor([len(new) for new in news])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
        positions = torch.cat([torch.arange(n) + first for first, n in zip(firsts, counts.tolist(), strict=True)])
        page = table[torch.arange(len(rows)).repeat_interleave(counts), positions // self.pool.page_size].long()
        slots = page * self.pool.page_size + positions % self.pool.page_size
        lengths = (torch.tensor(firsts) + counts).int()
        rotary = Rotary(self.model.cos, self.model.sin, positions)
        memory = rows[0].seq.memory  # the pool's may be the next daemon's, where page ids mean others' pages
        if decode and self.groups is None:
            self.groups = group_prefixes(table, lengths, self.pool.page_size, queries=STEP)
        self.counts["steps that share pages"] += decode and self.groups.shared_spans > 0
        self.counts["computed"] += len(positions)

        def attend(layer, q, k, v):
            keys, values = memory.keys(layer), memory.values(layer)
            q = append(k, v, keys, values, slots, rotary=rotary, q=q)
            if not decode:
                return prefill_attention(q, keys, values, table, lengths, starts)
            q = q.unflatten(0, (len(rows), STEP))  # guesses see those before them: causal; a tree_mask would do, too
            return decode_attention(q, keys, values, table, lengths, prefixes=self.groups).flatten(0, 1)

        return self.model(torch.tensor([token for new in news for token in new]), attend)


def guess(tokens):
    """What followed the last two tokens when they last stood there. A wrong guess costs nothing but itself."""
    for end in range(len(tokens) - 1, 1, -1):
        if tokens[end - 2 : end] == tokens[-2:]:
            return (tokens[end:] + [0] * GUESSES)[:GUESSES]
    return [0] * GUESSES


def random_llama(layers=2, width=48, head_dim=16):
    """Four query heads, two KV heads, 101 words."""
    square, wide = (64, width), (width, 64)
    shapes = {"self_attn.q_proj": square, "self_attn.k_proj": (32, width), "self_attn.v_proj": (32, width),
              "self_attn.o_proj": wide, "mlp.gate_proj": square, "mlp.up_proj": square, "mlp.down_proj": wide,
              "input_layernorm": (width,), "post_attention_layernorm": (width,)}  # fmt: skip
    named = {f"layers.{layer}.{name}": shape for layer in range(layers) for name, shape in shapes.items()}
    named |= {"embed_tokens": (101, width), "norm": (width,)}
    draw = torch.Generator().manual_seed(0)
    weights = {f"model.{name}.weight": torch.randn(shape, generator=draw) * 0.3 for name, shape in named.items()}
    return Llama(weights, head_dim, 100.0 ** (-torch.arange(0, head_dim, 2) / head_dim))


def smollm2():
    from radixkv.adapters import smollm2

    loaded, tokenizer = smollm2.load()
    return Llama(loaded.state_dict(), loaded.config.head_dim, loaded.model.rotary_emb.inv_freq), tokenizer


@torch.inference_mode()
def main(name):
    torch.set_num_threads(1)
    if name == "smollm2":
        model, tokenizer = smollm2()
        text = (Path(__file__).parent / "harbour-handbook.md").read_text()[:900]
        questions = ("When was the harbour founded?", "Who was Tobias Hale?", "Where is Skerrow?", "How deep is it?")
        prompts = [tokenizer(f"{text}\n\nQuestion: {question}\nAnswer:")["input_ids"] for question in questions]
        requests = [Request(prompt, len(prompt) + 16, tokenizer.eos_token_id) for prompt in prompts]
    else:
        model = random_llama()  # its prompts have the first six pages in common
        requests = [Request([*range(10, 34), 40 + number, 50, 51, 52 + number], 40 + number) for number in range(8)]
    with radixkv.connect() as client:
        engine = Engine(model, client.pool("default"), radixkv.Namespace(model=name))
        engine.run(requests)
    for row in requests:
        made = row.tokens[row.prompt :]
        print(tokenizer.decode(made, skip_special_tokens=True).strip() if name == "smollm2" else made)
    print(", ".join(f"{what}: {count}" for what, count in sorted(engine.counts.items())))


if __name__ == "__main__":
    main(*sys.argv[1:] or ["random"])
