"""What is remembered for the report of a bug: the last commands, and of large ones not what they hold."""

import json
import os
from contextlib import closing

from radixkv.commands import Heartbeat, Request, Reserve, Tick
from radixkv.daemon.last_words import COMMANDS_KEPT, WHOLE_BYTES, LastCommands
from radixkv.ipc.log import Lines

REQUEST = Request(7, 1, 42, 9.0, Heartbeat())


def told(last: LastCommands) -> list[dict[str, object]]:
    ours, theirs = os.pipe()
    last.tell(Lines(theirs))
    os.close(theirs)
    with closing(os.fdopen(ours)) as lines:
        return [json.loads(line) for line in lines]


def test_the_oldest_go_and_the_rest_is_told_in_order() -> None:
    last = LastCommands()
    for number in range(COMMANDS_KEPT + 3):
        last.note(float(number), Tick(number / 4))
    found = told(last)
    assert [line["at"] for line in found] == [float(number) for number in range(3, COMMANDS_KEPT + 3)]
    assert found[0]["command"] == repr(Tick(0.75))


def test_of_a_large_request_it_is_told_who_and_what() -> None:
    last = LastCommands()
    last.note_request(1.0, REQUEST, WHOLE_BYTES)
    last.note_request(2.0, REQUEST, WHOLE_BYTES + 1)
    whole, outline = (line["command"] for line in told(last))
    assert whole == repr(REQUEST)
    assert outline == repr((7, 1, 42, Heartbeat, WHOLE_BYTES + 1))


def test_a_long_command_is_cut_and_stays_a_whole_line() -> None:
    last = LastCommands()
    for name in ("é" * 1000, "x" * 2000, "\\" * 2000):
        last.note_request(2.0, Request(7, 1, 42, 9.0, Reserve(name, 1, b"", bytes(400))), WHOLE_BYTES)
    assert [len(str(line["command"])) for line in told(last)] == [2000] * 3
