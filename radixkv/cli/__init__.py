"""The command line: ``radixkv COMMAND``, a file for each command. Nothing below imports it."""
