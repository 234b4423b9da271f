"""The `normattn` command, also by `python -m normattn`: first the guard, then everything else."""

from normattn.stopping import run_stoppable


def main() -> None:
    """Run the command line of this process and exit; a signal at any time ends it in order."""
    run_stoppable(_command)


def _command() -> None:
    # Only here, under the guard: imports take long enough to be stopped in.
    from normattn.cli.app import main

    main()


if __name__ == "__main__":
    main()
