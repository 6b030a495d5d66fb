"""Measurements of radixkv, each with the bar it must keep: ``python -m bench`` prints them all.

``workload`` says what work is done, ``stopwatch`` how it is timed, ``rows`` how a figure is written; ``index``, ``ipc``
and ``daemon`` measure; ``peers`` does the same work with other projects' indexes, each in an environment of its own.
docs/performance.md says what every row means. This package imports nothing by itself: the peers' environments, which
have neither msgspec nor zmq, use ``bench.workload`` and ``bench.stopwatch`` too.
"""
