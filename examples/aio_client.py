"""Twenty requests at once in one event loop: start a daemon first with `radixkv serve`.

The first computes a system prompt and commits it; all others find it. One that takes too long is cancelled.
"""

import asyncio

import radixkv

SYSTEM_PROMPT = list(range(100, 132))  # 32 token ids; a real server gets them from its tokenizer
NAMESPACE = radixkv.Namespace(model="my-model")


async def answer(pool: radixkv.aio.Pool, number: int) -> int:
    prompt = [*SYSTEM_PROMPT, 1000 + number]
    async with await pool.reserve(prompt, namespace=NAMESPACE, headroom_tokens=8, timeout=5) as seq:
        # Where a model would compute the tokens from seq.cached_tokens on, into the pages of seq.page_table:
        await asyncio.sleep(0.01)
        await seq.commit(seq.length)
        return seq.cached_tokens


async def main() -> None:
    async with await radixkv.aio.connect() as client:
        pool = await client.pool("default")
        print("the first request finds", await answer(pool, 0), "tokens")
        found = await asyncio.gather(*(answer(pool, number) for number in range(1, 20)))
        print("nineteen more find", set(found))
        try:
            await asyncio.wait_for(answer(pool, 20), timeout=0.001)
        except TimeoutError:
            print("the last one was cancelled; its pages go back by themselves")


asyncio.run(main())
