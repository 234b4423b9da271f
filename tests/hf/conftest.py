"""The command line of the tests of commands."""

from cli.conftest import command

__all__ = ["command"]
