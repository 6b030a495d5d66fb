"""radixkv as the prefix cache behind vLLM: a KV connector for ``kv_connector_module_path``.

::

    --kv-transfer-config '{"kv_connector": "RadixKVConnector", "kv_connector_module_path": "radixkv.adapters.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

``connector.py`` is what vLLM calls; only it and ``zero_copy.py`` import vLLM. The rest runs, and is tested, without it.
How to use it: ``docs/vllm.md``.

=============== ====================================================================================
scheduler.py    what is cached of a prompt, what is to be loaded and saved: in vLLM's scheduler
worker.py       carries that out: copies between radixkv's pages and vLLM's blocks
ranks.py        the same when several workers hold a model together
door.py         the way to the daemon: deadlines, and no questions to one that is sick (breaker.py)
engine.py       whether an engine can be served, and what its keys and values depend on
namespace.py    what must be equal before two engines may share
blocks.py       tokens, blocks and pages in numbers; what travels from scheduler to worker
zero_copy.py    another connector: vLLM computes in radixkv's pages (leases.py, region.py)
bench/          ``radixkv bench vllm``
=============== ====================================================================================
"""

from __future__ import annotations

from typing import Any

__all__ = ["RadixKVConnector", "RadixKVZeroCopyConnector"]


def __getattr__(name: str) -> Any:
    """vLLM is imported by whoever asks for the connector, and by nobody else."""
    if name == "RadixKVConnector":
        from radixkv.adapters.vllm.connector import RadixKVConnector

        return RadixKVConnector
    if name == "RadixKVZeroCopyConnector":
        from radixkv.adapters.vllm.zero_copy import RadixKVZeroCopyConnector

        return RadixKVZeroCopyConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
