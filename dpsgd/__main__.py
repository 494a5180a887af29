"""``dpsgd`` and ``python -m dpsgd``: the command line, once it is loaded."""

import sys


def main() -> None:
    """Runs the command line; a signal while it is loaded ends in one line, too."""
    try:
        from dpsgd import command_line
    except KeyboardInterrupt:
        print("error: Stopped. Give the same command again.", file=sys.stderr)
        sys.exit(130)
    command_line.main()


if __name__ == "__main__":
    main()
