"""`python -m normattn`: the same as the `normattn` command."""

from normattn.cli.app import main

if __name__ == "__main__":
    main()
