"""``radixkv bench vllm``: one load, four ways to cache it, each in vLLM engines of their own.

=========== =======================================================================
load.py     the requests: documents, and questions about them
run.py      the four ways, who runs what, what is measured
report.py   the table
process.py  an engine's process, seen from outside
child.py    the same from inside: runs where vLLM is installed, as do tests/engines
=========== =======================================================================
"""
