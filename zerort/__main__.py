"""``python -m zerort``: the `zerort` command."""

import sys

from zerort.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
