"""`python -m piper`: the same as the console script `piper`."""

import sys

from piper.cli import main

if __name__ == "__main__":
    sys.exit(main())
