"""The whole of radixkv in one deterministic, single-threaded world: time, threads, network and deaths are all drawn.

Real: engine, sessions, recovery and resume, descriptor table and its writer, wire codec, the client's core, verbs,
outbox and resume. Simulated, each in a file of its own:

=================  ==============================================================================
``world.py``       what may happen next, the end of everything; ``odds.py`` how often it does
``network.py``     connections: delay, loss, order, as ZeroMQ has them
``daemon.py``      a daemon's loop around the engine; ``attendance.py`` who is attached to it
``supervisor.py``  how daemons die and start; ``cuts.py`` killed between two stores into the table
``store.py``       what outlives a daemon, and which content each sequence means
``client.py``      a worker process; ``shell.py`` its threads, ``keeper.py`` the one that connects
``sequence.py``    a sequence and what is really in its pages; ``contents.py`` those pages
``work.py``        what workers do with sequences; ``device.py`` writes the rows, late
``copier.py``      copies between tiers that end late, badly, or never
``checks.py``      what must hold after each command, and in the end
``stage.py``       what all of them share; one ``Setup`` replays one world
``shrink.py``      from a setup that fails to the smallest that still does
=================  ==============================================================================
"""
