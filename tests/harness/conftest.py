"""The command line and one tiny trained run, which lm-evaluation-harness asks."""

from cli.conftest import command, corpus, tiny
from cli.conftest import trained as run

__all__ = ["command", "corpus", "run", "tiny"]
