"""radixkv in a decode loop of one's own, from prompt to tokens: start a daemon first, with
`radixkv serve --pool name=default,layers=2,kv_heads=2,head_dim=8,dtype=float32,page_size=4,pages=64`.
"""

import time

import torch

import radixkv
from radixkv.kernels import Rotary, append, decode_attention, prefill_attention

LAYERS, HEADS, KV_HEADS, DIM, WIDTH, VOCABULARY = 2, 4, 2, 8, 32, 101
LOST = (radixkv.StaleHandle, radixkv.SessionLost, radixkv.Unavailable, radixkv.Timeout, radixkv.Draining)

# The model: two layers of attention with random weights. Here would be yours.
torch.manual_seed(0)
embedding, unembedding = torch.randn(VOCABULARY, WIDTH), torch.randn(WIDTH, VOCABULARY)
shapes = {"q": (WIDTH, HEADS * DIM), "k": (WIDTH, KV_HEADS * DIM), "v": (WIDTH, KV_HEADS * DIM)}
weights = [{name: torch.randn(shape) / 6 for name, shape in shapes.items()} for _ in range(LAYERS)]
angles = torch.outer(torch.arange(256.0), 100.0 ** (-torch.arange(0, DIM, 2) / DIM))
cos, sin = angles.cos(), angles.sin()


def forward(tokens, attend):
    """Logits for what follows `tokens`; only `attend` knows what came before them."""
    hidden = embedding[tokens]
    for layer, weight in enumerate(weights):
        q, k, v = ((hidden @ weight[name]).unflatten(1, (-1, DIM)) for name in "qkv")  # [tokens, heads, DIM]
        hidden = hidden + attend(layer, q, k, v).flatten(1)
    return hidden[-1] @ unembedding


def attention(pool, seq, start, end):
    """What a layer does for the tokens start to end - 1: put them into the pages, then read all up to them."""
    table = torch.tensor(seq.page_table)  # entry i: the page of the tokens i * page_size and following
    positions = torch.arange(start, end)
    slots = table[positions // pool.page_size].long() * pool.page_size + positions % pool.page_size
    lengths = torch.tensor([end], dtype=torch.int32)
    starts = torch.tensor([0, end - start], dtype=torch.int32)

    def attend(layer, q, k, v):
        keys, values = seq.memory.keys(layer), seq.memory.values(layer)  # [pages, page_size, KV_HEADS, DIM], shared
        q = append(k, v, keys, values, slots, rotary=Rotary(cos, sin, positions), q=q)
        if end - start == 1:
            return decode_attention(q, keys, values, table[None], lengths)
        return prefill_attention(q, keys, values, table[None], lengths, starts)

    return attend


def go_on(pool, namespace, tokens, until, room):
    """Appends to `tokens` until they are so many. All that is lost with a LOST error, or with OutOfPages, is time."""
    with pool.reserve(tokens, namespace=namespace, headroom_tokens=room, timeout=30.0) as seq:  # 1. reserve
        written = seq.cached_tokens  # the first of them are there already: computed here, or by somebody else
        print(f"{written} of {len(tokens)} tokens are cached")
        prompt = len(tokens)
        while True:
            logits = forward(tokens[written:], attention(pool, seq, written, len(tokens)))  # 2. append, attention
            if not seq.valid():  # were the pages taken from us meanwhile? Then these logits mean nothing
                raise radixkv.SessionLost("pages were lost")
            written = len(tokens)
            if written in (prompt, seq.capacity_tokens):  # once for the prompt, then once a page:
                seq.extend(tokens[seq.length :], headroom_tokens=pool.page_size)  # 3. what is new, and room for more
                seq.commit(written)  # 4. keys and values up to here are complete: full pages are everybody's
            tokens.append(int(logits.argmax()))
            if len(tokens) == until:
                break
        seq.extend(tokens[seq.length : written])
        seq.free(commit=written)  # 5. full pages stay cached, the rest goes back. An exception would give all back


def generate(pool, namespace, prompt, count):
    tokens, until, room = list(prompt), len(prompt) + count, pool.page_size
    while len(tokens) < until:
        try:
            go_on(pool, namespace, tokens, until, room)
        except radixkv.OutOfPages as error:  # no page for reserve, in 30 s, or for extend: ours have gone back by now
            if error.never_fits:
                print("the pool is too small for the rest")
                break
            room = max(room, until - len(tokens))  # wait until there is room for all the rest, so that this was all
            print(f"again, after {error.code}")
        except LOST as error:  # a lapsed lease, or another daemon: reserve what is known so far, most of it is cached
            print(f"again, after {error.code}")
            time.sleep(0.1)
    return tokens[len(prompt) :]


with radixkv.connect() as client:
    pool = client.pool("default")
    weights_id = radixkv.Namespace(model="two layers of seed 0")
    first = generate(pool, weights_id, range(10, 30), 12)
    print(first)
    again = generate(pool, weights_id, range(10, 30), 12)
    turn = [*range(10, 30), *first, 7, 8, 9]
    more = generate(pool, weights_id, turn, 6)
    # The same with nothing cached, as a check:
    print(again == first, more == generate(pool, radixkv.Namespace(model="nothing is cached here"), turn, 6))
