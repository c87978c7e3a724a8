"""`python -m kvnb`, and the `kvnb` script."""

import sys

from kvnb.stopping import stoppable


def main() -> None:
    """A signal ends each command with one line, and with the status that shells give it."""
    with stoppable(ends=True):  # what the commands need is imported in it, too: that takes a while
        try:
            from kvnb.cli import app
        except ValueError as error:  # of kvnb.paths: what the environment lacks
            print(f"kvnb: {error}", file=sys.stderr)
            sys.exit(2)
        except ModuleNotFoundError as error:
            if error.name and error.name.split(".")[0] == "kvnb":
                raise
            sys.exit(f"{error}: `python -m kvnb.wheels check report` lists all that {sys.executable} lacks")
        app()


if __name__ == "__main__":
    main()
