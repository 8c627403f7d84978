"""The command line: python -m torchmali audit MODULE:FUNCTION."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

from torchmali.audit import METHODS, audit
from torchmali.solution import SolverError, require

NEEDED = "it must return (func, y0, t) or (func, y0, t, loss), the first arguments of audit"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m torchmali", description="Tools around Neural ODE gradients.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "compare all gradient methods on a problem of your own, and say which one to take"
    command = commands.add_parser("audit", help=about, description=f"{about.capitalize()}.")
    what = f"or path/to/file.py:FUNCTION; it is called without arguments, and {NEEDED}"
    command.add_argument("problem", metavar="MODULE:FUNCTION", help=what)
    command.add_argument("--rtol", type=float, default=1e-3, help="relative tolerance of the methods (%(default)s)")
    command.add_argument("--atol", type=float, default=1e-4, help="absolute tolerance of the methods (%(default)s)")
    command.add_argument("--methods", nargs="+", metavar="NAME", help=f"some of {', '.join(METHODS)} (all)")
    command.add_argument("--html", type=Path, metavar="FILE", help="write the table to this file, too")
    options = parser.parse_args(arguments)
    try:
        folder = options.html.parent if options.html else Path()
        require(folder.is_dir(), f"There is no folder {folder} for --html.")
        found = audit(*load(options.problem), methods=options.methods, rtol=options.rtol, atol=options.atol)
    except SolverError as error:
        command.exit(2, f"{error}\n")
    sys.stdout.write(f"{found}\n")
    if options.html:
        options.html.write_text(f'<!doctype html><meta charset="utf-8">{found._repr_html_()}', encoding="utf-8")


def load(text: str) -> tuple[Any, ...]:
    """What the function of that name returns."""
    place, _, name = text.rpartition(":")
    require(bool(place and name), f"{text!r} names no function: write MODULE:FUNCTION or path/to/file.py:FUNCTION.")
    if place.endswith(".py"):
        require(Path(place).is_file(), f"There is no file {place}.")
        sys.path.insert(0, str(Path(place).parent))  # as for a script: its neighbours can be imported
        names = runpy.run_path(place)
    else:
        try:
            names = vars(importlib.import_module(place))
        except ModuleNotFoundError as error:
            is_another = not f"{place}.".startswith(f"{error.name}.")  # which the module itself wants to import
            require(is_another, f"There is no module {place!r} here. For a file, write path/to/file.py:{name}.")
            raise
    own = [key for key, x in names.items() if callable(x) and getattr(x, "__module__", None) == names["__name__"]]
    require(callable(names.get(name)), f"{place} has no function {name!r}; it has {', '.join(own) or 'none'}.")
    problem = names[name]()
    got = f"{len(problem)} values" if isinstance(problem, tuple) else f"a {type(problem).__name__}"
    require(isinstance(problem, tuple) and len(problem) in (3, 4), f"{text} returned {got}, but {NEEDED}.")
    return problem


if __name__ == "__main__":
    main()
