"""Tests in ``on_driver`` run where there is a CUDA driver: the real one, or the fake one as in ``test_suites.py``."""

from tests.conftest import DEVICE

collect_ignore_glob = [] if DEVICE != "cpu" else ["on_driver/*"]
