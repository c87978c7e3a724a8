"""`python -m kvnb`, and the `kvnb` script."""

import sys


def main() -> None:
    try:
        from kvnb.cli import app
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "kvnb":
            raise
        sys.exit(f"{error}: `python -m kvnb.wheels check report` lists all that {sys.executable} lacks")
    app()


if __name__ == "__main__":
    main()
