"""Deliberate bugs, a patch file each, and the part of the test suite that has to find every one of them.

``make mutants`` applies each patch of ``patches/`` to a copy of the working tree and runs the suite's pure part there,
which stops at its first failure. ``make mutants PATCHES=DIR`` takes the patches of another folder. ``make pure`` runs
the pure part on the tree as it is.
"""
