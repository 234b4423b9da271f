"""What a command or a module imports, by name: time is another thing on each machine."""

from __future__ import annotations

import json
import subprocess
import sys

SLOW = ("matplotlib", "sympy", "transformers", "torch._dynamo", "torch._inductor", "triton")
"""What takes a second or more to import, and what no listing, help or protocol needs."""


def imported(script: str) -> set[str]:
    """The modules that a fresh interpreter holds after `script`."""
    ending = "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script + ending], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def command(*arguments: str) -> str:
    """A script that runs a command and goes on."""
    return (
        "from normattn.cli.app import main\n"
        f"try: main({list(arguments)})\n"
        "except SystemExit as ended: assert ended.code == 0"
    )


def test_help_waits_for_no_library() -> None:
    held = imported("\n".join((command("--help"), command("train", "--help"))))
    assert "normattn.cli.options" in held
    assert not held & {"torch", "numpy", *SLOW}


def test_list_imports_what_it_asks_and_no_more() -> None:
    held = imported(command("list"))
    assert "normattn.score.parts" in held
    assert not held & {"normattn.layers.explain", "normattn.models", "normattn.lab.training", *SLOW}


def test_protocols_and_training_draw_nothing_and_compile_nothing() -> None:
    held = imported(
        "import normattn.lab.evaluation.language_model, normattn.lab.training, "
        "normattn.lab.sweep.runner"
    )
    assert {"normattn.lab.evaluation.language_model", "normattn.lab.training.step"} <= held
    assert not held & {*SLOW, "scipy"}
