"""Hypothesis for all unit tests: the same examples in every run, so that a red test stays red until it is mended.

Longer and random runs: ``python -m fuzz``, or the environment variable ``HYPOTHESIS_PROFILE=explore``.
"""

import os

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("steady", derandomize=True, database=None, max_examples=40, stateful_step_count=40, **_COMMON)
settings.register_profile("explore", print_blob=True, max_examples=500, stateful_step_count=80, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
