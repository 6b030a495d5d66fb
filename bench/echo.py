"""The floor under every request: a blocking ROUTER that answers frames with bytes made beforehand. Nothing is decoded.

``python -m bench.echo ENDPOINT THRESHOLD LARGE SMALL``: requests of more than THRESHOLD bytes get LARGE bytes, others
SMALL ones. Plain recv and send, which cost less than their multipart forms.
"""

from __future__ import annotations

import sys

import zmq


def echo(endpoint: str, threshold: int, large: int, small: int) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    long_answer, short_answer = bytes(large), bytes(small)
    print("ready", flush=True)
    while True:
        sender = socket.recv()
        request = socket.recv()
        socket.send(sender, zmq.SNDMORE)
        socket.send(long_answer if len(request) > threshold else short_answer)


if __name__ == "__main__":
    echo(sys.argv[1], *map(int, sys.argv[2:5]))
