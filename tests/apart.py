"""Programs in processes of their own, without the checks of types, which torch cannot trace.

They are forked from a server that has imported torch, its compiler and the library once: each
would take seconds to import them anew. What is about imports themselves takes a new interpreter.
"""

from __future__ import annotations

import io
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import types
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

SECONDS = 1800  # far beyond what any takes: speed is not tested here
PRELOADED = (
    *("torch._dynamo", "normattn.lab.training.fsdp", "training.group"),
    # What the first compiled graph imports.
    *("torch._functorch.aot_autograd", "torch._inductor.codecache", "torch._inductor.lowering"),
    "torch.export._trace",
    *("normattn.cli.app", "normattn.cli.reproduce", "normattn.lab.sweep.runner"),
    "transformers.models.llama.modeling_llama",
)


def context() -> ForkServerContext:
    """Where processes are begun."""
    found = mp.get_context("forkserver")
    found.set_forkserver_preload(list(PRELOADED))
    return found


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it printed."""

    code: int
    out: str
    err: str


class Program:
    """The text of a program at work, as by `python -c TEXT ARGUMENTS…` with `told` on its stdin."""

    def __init__(self, text: str, *arguments: object, told: str = "") -> None:
        self._folder = tempfile.TemporaryDirectory()
        given = (text, [str(each) for each in arguments], told, self._folder.name)
        self._process = context().Process(target=_become, args=given)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; of SIGKILL it is gone on return."""
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self._process.join(SECONDS)

    @property
    def ended(self) -> bool:
        return self._process.exitcode is not None

    def printed(self, name: str = "out") -> str:
        file = Path(self._folder.name, name)
        return file.read_text() if file.exists() else ""

    def complained(self) -> str:
        return self.printed("err")

    def clear(self) -> None:
        """Nothing is left of it, whether it ended or not."""
        if self._process.exitcode is None:
            self.send(signal.SIGKILL)
        self._folder.cleanup()

    def end(self) -> Ended:
        """Wait for it."""
        with self._folder as folder:
            self._process.join(SECONDS)
            code = self._process.exitcode
            self._process.kill()
            out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        assert code is not None, f"no end within {SECONDS} s: {err[-2000:]}"
        return Ended(code, out, err)


def run(text: str, *arguments: object, told: str = "") -> Ended:
    return Program(text, *arguments, told=told).end()


def _become(text: str, arguments: list[str], told: str, folder: str) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
    import torch

    torch.set_num_threads(1)
    sys.stdin, sys.argv = io.StringIO(told), ["-c", *arguments]
    # The compiler looks for a function's globals in the module of that name.
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(text, "<string>", "exec", dont_inherit=True), main.__dict__)
