"""`python -m megarl.rollout.sglang_cpu install|check|uninstall`; exit status 1 on failure."""

from __future__ import annotations

import argparse
import sys

from megarl.rollout.sglang_cpu.install import ShimError, check, install, uninstall


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megarl.rollout.sglang_cpu", description=__doc__
    )
    parser.add_argument("action", choices=["install", "check", "uninstall"])
    action = {"install": install, "check": check, "uninstall": uninstall}[
        parser.parse_args().action
    ]
    try:
        print(f"sglang on cpu: {action()}")
    except ShimError as error:
        print(f"sglang on cpu: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
