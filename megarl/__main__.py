"""`python -m megarl`: what torchrun starts on every rank."""

import sys

from megarl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
