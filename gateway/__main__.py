"""`python -m gateway`: the same as the command `kvgate`."""

import sys

from gateway.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
