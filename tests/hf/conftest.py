"""The command line of the tests of commands, whose reports are not drawn."""

from cli.conftest import _undrawn, command

__all__ = ["_undrawn", "command"]
