"""These tests run in a process of their own, in Triton's interpreter: ``test_interpreter.py`` starts it.

Whether a kernel is interpreted is settled when Triton is imported, and nothing can be compiled in such a process.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
