"""Two workers' worth of prefix sharing in one file: start a daemon first with `radixkv serve`.

Worker one computes a prompt and commits it; worker two finds it and computes one token only.
"""

import radixkv

PROMPT = list(range(100, 164))  # 64 token ids; a real worker gets them from its tokenizer
NAMESPACE = radixkv.Namespace(model="my-model")


def worker(name: str) -> None:
    with radixkv.connect() as client:
        pool = client.pool("default")
        with pool.reserve(PROMPT, namespace=NAMESPACE, headroom_tokens=16) as seq:
            print(f"{name}: {seq.cached_tokens} of {seq.length} tokens are cached; pages {seq.page_table.tolist()}")
            # Where a model would write the keys and values of the tokens that are not cached:
            for layer in range(pool.spec.layers):
                keys, values = seq.memory.keys(layer), seq.memory.values(layer)
                for token in range(seq.cached_tokens, seq.length):
                    page, row = seq.page_table[token // pool.page_size], token % pool.page_size
                    keys[page, row] = token
                    values[page, row] = -token
            seq.commit(seq.length)  # complete: full pages are visible to everyone from now on
            assert seq.valid()  # nobody took a page away while we worked


worker("worker one")
worker("worker two")
