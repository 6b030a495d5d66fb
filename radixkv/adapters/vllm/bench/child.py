"""A vLLM engine that does what it is told on stdin, a JSON object a line, and answers on stdout. Runs where vLLM is.

The first line has ``vllm.LLM``'s arguments; the answer is {"ready": true} with versions, or {"error": "..."} and the
end. Then {"prompts": [[token, ...], ...], "max_tokens": n, "salt": null, "lora": [number, folder] or null,
"abort": [index, ...]} generates greedily; requests of ``abort`` are aborted after the first step, and with "tell" there
is a line {"step": 1} after it. The answer has [output tokens, cached tokens, finished] for each prompt, when each had
its first token, and what the engine and the connector still hold.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

ERROR_CHARACTERS = 300


def make(settings: dict[str, Any]) -> Any:
    from vllm import LLM

    given = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 2048, "max_num_seqs": 64}
    return LLM(
        **{**given, "distributed_executor_backend": "uni", "kv_cache_memory_bytes": 1 << 30, "seed": 0, **settings}
    )


def generate(llm: Any, job: dict[str, Any], answers: Any) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    engine = llm.llm_engine
    began = time.perf_counter()
    sampling = {"temperature": 0.0, "max_tokens": job["max_tokens"], "ignore_eos": True, "detokenize": False}
    lora = LoRARequest(f"lora-{job['lora'][0]}", *job["lora"]) if job.get("lora") else None
    for number, tokens in enumerate(job["prompts"]):
        prompt = {"prompt_token_ids": tokens}
        if job.get("salt") is not None:
            prompt["cache_salt"] = job["salt"]
        engine.add_request(str(number), prompt, SamplingParams(**sampling), lora_request=lora)
    results: list[Any] = [[[], None, False] for _ in job["prompts"]]
    first_tokens_s: list[float | None] = [None] * len(results)
    aborted = [str(number) for number in job.get("abort", [])]
    while engine.has_unfinished_requests():
        for output in engine.step():
            number, completion = int(output.request_id), output.outputs[0]
            first_tokens_s[number] = first_tokens_s[number] or time.perf_counter() - began
            results[number] = [list(completion.token_ids), output.num_cached_tokens, output.finished]
        if aborted:
            engine.abort_request(aborted)
            aborted = []
        if job.pop("tell", False):
            print(json.dumps({"step": 1}), file=answers, flush=True)
    seconds = time.perf_counter() - began
    return {"results": results, "first_tokens_s": first_tokens_s, "seconds": seconds, "idle": holdings(engine)}


def holdings(engine: Any) -> dict[str, int]:
    scheduler = engine.engine_core.engine_core.scheduler
    ours = getattr(scheduler.connector, "_scheduler", None)
    return {
        "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "requests": len(scheduler.requests),
        "prompts": len(ours._prompts) if ours else 0,
    }


def started(answers: Any) -> Any:
    """The engine, or None when it does not start."""
    import torch
    import vllm

    settings = json.loads(sys.stdin.readline())
    try:
        llm = make(settings)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is passed on to whoever asked for the engine
        said = " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARACTERS]
        print(json.dumps({"error": said}), file=answers, flush=True)
        return None
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    print(json.dumps({"ready": True, "versions": versions}), file=answers, flush=True)
    return llm


def main() -> None:
    # vLLM writes to stdout as well: answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = started(answers)
    for line in sys.stdin if llm is not None else ():
        print(json.dumps(generate(llm, json.loads(line), answers)), file=answers, flush=True)


if __name__ == "__main__":
    main()
