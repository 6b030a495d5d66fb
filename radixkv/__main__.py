"""``python -m radixkv``: the same as the ``radixkv`` command."""

import sys

from radixkv.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
