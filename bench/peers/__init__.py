"""The same admissions with other projects' prefix indexes, each in an environment of its own, beside radixkv's engine.

``python -m bench.peers`` (``__main__``) builds the environments, starts one worker process a peer and lets them do
slices of W3, W4 and W4b in turns. ``recipes`` says how an environment is made, ``worker`` is the loop that each
``run_*`` hands its admissions to, ``stubs`` stands in for modules that a peer imports and never calls, ``report`` says
what came out.
"""
