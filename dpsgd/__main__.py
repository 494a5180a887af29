"""``python -m dpsgd``: the command line."""

from dpsgd.command_line import main

if __name__ == "__main__":
    main()
