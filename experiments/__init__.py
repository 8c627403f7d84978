"""Every experiment of the paper: run, resume, compare, show. `python -m experiments --help`."""
