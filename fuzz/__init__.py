"""Fuzzers: random work against the real parts, compared step by step with models that are obviously right.

``python -m fuzz list`` names them, ``python -m fuzz NAME --seed N --steps M`` runs one and can be replayed,
``python -m fuzz smoke`` runs all of them shortly and refuses to pass if a rare event was not met often enough,
``python -m fuzz canary`` plants a known bug and must see it found.
"""
