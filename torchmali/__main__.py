"""The command line: python -m torchmali audit MODULE:FUNCTION."""

from __future__ import annotations

import argparse
import importlib
import inspect
import runpy
import sys
from pathlib import Path
from typing import Any

from torchmali.auditing import METHODS, audit
from torchmali.errors import InvalidOptionError, SolverError

NEEDED = (
    "it must return the first arguments of audit, (func, y0, t) or (func, y0, t, loss), or (module, y0), or a dict of "
    "arguments by name"
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m torchmali", description="Tools around Neural ODE gradients.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "compare all gradient methods on a problem of your own, and say which one to take"
    command = commands.add_parser("audit", help=about, description=f"{about.capitalize()}.")
    what = f"or path/to/file.py:FUNCTION; it is called without arguments, and {NEEDED}"
    command.add_argument("problem", metavar="MODULE:FUNCTION", help=what)
    default = "(that of the module, or {})"
    command.add_argument("--rtol", type=float, help=f"relative tolerance of the methods {default.format(1e-3)}")
    command.add_argument("--atol", type=float, help=f"absolute tolerance of the methods {default.format(1e-4)}")
    command.add_argument("--methods", nargs="+", metavar="NAME", help=f"some of {', '.join(METHODS)} (all)")
    limit = "time for the whole audit; inf: no limit (60)"
    command.add_argument("--max-seconds", type=float, metavar="SECONDS", help=limit)
    line = "tell on stderr what is being measured (if that is a terminal)"
    command.add_argument("--progress", action=argparse.BooleanOptionalAction, help=line)
    command.add_argument("--html", type=Path, metavar="FILE", help="write the table to this file, too")
    options = parser.parse_args(arguments)
    try:
        folder = options.html.parent if options.html else Path()
        if not folder.is_dir():
            raise InvalidOptionError(f"There is no folder {folder} for --html.")
        found = audit(**arguments_of(options))
    except SolverError as error:
        command.exit(2, f"{error}\n")
    sys.stdout.write(f"{found}\n")
    if options.html:
        options.html.write_text(f'<!doctype html><meta charset="utf-8">{found._repr_html_()}', encoding="utf-8")


def arguments_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of audit: those of the problem, overridden by those of the command line."""
    names = ("methods", "rtol", "atol", "max_seconds", "progress")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return {**load(options.problem), **given}


def load(text: str) -> dict[str, Any]:
    """Call the function that the text names, and return its result as arguments of audit."""
    place, _, name = text.rpartition(":")
    if not (place and name):
        raise InvalidOptionError(f"{text!r} names no function: write MODULE:FUNCTION or path/to/file.py:FUNCTION.")
    names = _names_in(place, name)
    own = [key for key, x in names.items() if callable(x) and getattr(x, "__module__", None) == names["__name__"]]
    if not callable(names.get(name)):
        raise InvalidOptionError(f"{place} has no function {name!r}; it has {', '.join(own) or 'none'}.")
    return _arguments(text, names[name]())


def _names_in(place: str, name: str) -> dict[str, Any]:
    """Return the names that a file or a module defines."""
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise InvalidOptionError(f"There is no file {place}.")
        sys.path.insert(0, str(Path(place).parent))  # as for a script: its neighbours can be imported
        return runpy.run_path(place)
    try:
        return vars(importlib.import_module(place))
    except ModuleNotFoundError as error:
        is_another = not f"{place}.".startswith(f"{error.name}.")  # one that the module itself imports
        if is_another:
            raise
        raise InvalidOptionError(
            f"There is no module {place!r} here. For a file, write path/to/file.py:{name}."
        ) from None


def _arguments(text: str, problem: Any) -> dict[str, Any]:
    """Return the result of the user's function as arguments of audit."""
    known = list(inspect.signature(audit).parameters)
    if isinstance(problem, tuple):
        if len(problem) not in (2, 3, 4):
            raise InvalidOptionError(f"{text} returned {len(problem)} values, but {NEEDED}.")
        return dict(zip(known, problem, strict=False))
    if not isinstance(problem, dict):
        raise InvalidOptionError(f"{text} returned a {type(problem).__name__}, but {NEEDED}.")
    unknown, missing = [key for key in problem if key not in known], [key for key in known[:2] if key not in problem]
    what = f"{text} returned a dict with {list(problem)}, but audit"
    if unknown:
        raise InvalidOptionError(f"{what} has no argument {', '.join(map(str, unknown))}; it has {', '.join(known)}.")
    if missing:
        raise InvalidOptionError(f"{what} needs {' and '.join(missing)}.")
    return problem


if __name__ == "__main__":
    main()
