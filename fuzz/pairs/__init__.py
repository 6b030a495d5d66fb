"""A real part and its model side by side: each operation is done to both and everything visible is compared.

Fuzzers (``fuzz/targets``) and Hypothesis machines (``tests/unit``) drive the same pairs.
"""
