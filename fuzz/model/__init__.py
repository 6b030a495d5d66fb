"""Naive models: slow, plain, recounted from scratch, and written from docs/protocol.md, not from the code they judge.

Nothing here imports radixkv's tree, allocator, evictor, sessions or engine; only the messages themselves.
"""
