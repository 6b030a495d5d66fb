"""A vLLM engine that does what it is told on stdin, a JSON object a line, and answers on stdout. Runs in .venv-vllm.

{"prompts": [[token, ...], ...], "max_tokens": n, "salt": null, "abort": [index, ...]} generates greedily; requests of
``abort`` are aborted after the first step, and with "tell" there is a line {"step": 1} after it. The answer has
[output tokens, cached tokens, finished] for each prompt, and what the engine and the connector still hold.
"""

import json
import os
import sys
import time
from typing import Any


def make(settings: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(
        model=settings["model"],
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=settings.get("prefix_caching", True),
        distributed_executor_backend="uni",
        kv_transfer_config=settings.get("kv_transfer_config"),
        kv_cache_memory_bytes=1 << 30,
        seed=0,
    )


def generate(llm: Any, job: dict[str, Any], answers: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    engine = llm.llm_engine
    began = time.perf_counter()
    sampling = {"temperature": 0.0, "max_tokens": job["max_tokens"], "ignore_eos": True}
    for number, tokens in enumerate(job["prompts"]):
        prompt = {"prompt_token_ids": tokens}
        if job.get("salt") is not None:
            prompt["cache_salt"] = job["salt"]
        engine.add_request(str(number), prompt, SamplingParams(**sampling))
    results: list[Any] = [[[], None, False] for _ in job["prompts"]]
    aborted = [str(number) for number in job.get("abort", [])]
    first_token_s = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            completion = output.outputs[0]
            first_token_s = first_token_s or time.perf_counter() - began
            results[int(output.request_id)] = [list(completion.token_ids), output.num_cached_tokens, output.finished]
        if aborted:
            engine.abort_request(aborted)
            aborted = []
        if job.pop("tell", False):
            print(json.dumps({"step": 1}), file=answers, flush=True)
    seconds = time.perf_counter() - began
    return {"results": results, "first_token_s": first_token_s, "seconds": seconds, "idle": holdings(engine)}


def holdings(engine: Any) -> dict[str, int]:
    scheduler = engine.engine_core.engine_core.scheduler
    return {
        "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "requests": len(scheduler.requests),
        "prompts": len(scheduler.connector._scheduler._prompts) if scheduler.connector else 0,
    }


def main() -> None:
    # vLLM writes to stdout as well: answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = make(json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(llm, json.loads(line), answers)), file=answers, flush=True)


if __name__ == "__main__":
    main()
