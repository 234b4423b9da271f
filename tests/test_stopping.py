"""The guard against signals, where Python would lose a stop or a library would rename it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from normattn import stopping
from normattn.stopping import StopRequest

PREAMBLE = """
import ctypes, os, signal, sys, time
import normattn.stopping as stopping
stopping.GRACE_SECONDS = 0.5
def stop():
    os.kill(os.getpid(), signal.SIGTERM)
"""

WAYS = {
    "between two instructions": "stop(); time.sleep(60)",
    "in a destructor": """
        class Doomed:
            def __del__(self):
                stop()
                time.sleep(0.01)
        Doomed()
        time.sleep(60)""",
    "under another name": """
        try:
            stop()
            time.sleep(60)
        except BaseException as error:
            raise ValueError("the file is damaged") from error""",
    "with another exit status": """
        try:
            stop()
            time.sleep(60)
        except BaseException:
            sys.exit(1)""",
    "swallowed": """
        try:
            stop()
            time.sleep(60)
        except BaseException:
            pass
        time.sleep(60)""",
    "in a long call into C": """
        # The signal goes to another thread, so nothing interrupts the call of this one.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        __import__("threading").Timer(0.2, stop).start()
        ctypes.CDLL(None).poll(None, 0, 60000)""",
    "twice": "stop(); stop(); time.sleep(60)",
}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)


def run(body: str) -> tuple[int, str]:
    lines = [f"    {line.removeprefix('        ')}" for line in body.strip("\n").splitlines()]
    script = "\n".join([PREAMBLE, "def command():", *lines, "stopping.run_stoppable(command)"])
    done = python("-c", script)
    return done.returncode, done.stderr


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_is_one_sentence_and_130(way: str) -> None:
    said = "normattn: stopped by SIGTERM; rerun the command to resume\n"
    assert run(WAYS[way]) == (130, said)


def test_without_a_signal_the_outcome_is_the_command_s() -> None:
    assert run("sys.exit(3)") == (3, "")
    code, said = run("raise ValueError('ours')")
    assert code == 1
    assert "ValueError: ours" in said
    # A signal at the very end changes nothing.
    assert run("import atexit; atexit.register(stop)") == (0, "")


def test_work_with_handlers_of_its_own_is_left_alone() -> None:
    ours = """
        with stopping.StopRequest() as request:
            stop()
            time.sleep(1.5)
        print(request.by, file=sys.stderr)"""
    assert run(ours) == (0, "SIGTERM\n")


def test_the_guard_stands_before_anything_heavy_is_imported() -> None:
    script = (
        "import sys; import normattn.__main__\n"
        "heavy = {'torch', 'numpy', 'typer', 'typing', 'normattn.cli'} & set(sys.modules)\n"
        "print(*sorted(heavy))"
    )
    done = python("-S", "-c", script)
    assert (done.returncode, done.stdout.strip()) == (0, "")


@pytest.fixture
def others() -> Iterator[list[int]]:
    """The signals that come to whoever handled them before."""
    came: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, lambda n, _: came.append(n)) for kind in kinds}
    yield came
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_who_asks_again_does_not_want_to_wait(
    kind: signal.Signals, at_once: bool, others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a scheduler and a parent that both send SIGTERM said it once."""
    if not at_once:
        monkeypatch.setattr(stopping, "DUPLICATE_SECONDS", -1.0)
    with StopRequest() as request:
        signal.raise_signal(kind)
        assert (request.by, others) == (kind.name, [])
        signal.raise_signal(kind)
        signal.raise_signal(kind)
    assert others == ([] if at_once and kind == signal.SIGTERM else [kind, kind])
