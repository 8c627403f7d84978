"""All benchmarks, one after the other; each says whether its limits were kept.

    python -m benchmarks [--no-record]

A benchmark runs in a process of its own: it pins itself to a core.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

MODULES = ("gradients", "budget", "exact", "environment", "overhead", "work_precision", "images")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = ["--no-record"] if parser.parse_args().no_record else []
    commands = {name: [sys.executable, "-m", f"benchmarks.{name}", *options] for name in MODULES}
    missed = [name for name, command in commands.items() if subprocess.run(command, check=False).returncode]
    if missed:
        raise SystemExit(f"Limits were missed in: {', '.join(missed)}.")


if __name__ == "__main__":
    main()
