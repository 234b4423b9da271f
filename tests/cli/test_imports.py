"""What a command or a module imports, by name: time is another thing on each machine."""

from __future__ import annotations

import json
import subprocess
import sys

SLOW = {"matplotlib", "sympy", "transformers", "torch._dynamo", "torch._inductor", "triton"}
"""What takes a second or more to import, and what no listing, help or protocol needs."""
PROGRAM = """
import json, sys
from normattn.cli.app import main

def held():
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)

for words in (["--help"], ["train", "--help"], ["list"]):
    try: main(words)
    except SystemExit as ended: assert ended.code == 0
    if words[0] != "--help": held()
import normattn.lab.evaluation.language_model, normattn.lab.training, normattn.lab.sweep.runner
held()
import normattn.cli.export, normattn.lab.report.output
held()
"""


def test_a_command_waits_for_no_library_that_it_does_not_need() -> None:
    """A fresh interpreter: after help, a listing, and with protocols, training and reports."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    held = [set(json.loads(line)) for line in done.stderr.splitlines()[-4:]]
    help_, listing, protocols, reports = held
    assert "normattn.cli.options" in help_
    assert not help_ & {"torch", "numpy", *SLOW}
    assert "normattn.score.parts" in listing
    more = {"normattn.layers.explain", "normattn.models", "normattn.lab.training"}
    assert not listing & {*more, *SLOW}
    # What is trained and measured draws nothing and compiles nothing.
    assert {"normattn.lab.evaluation.language_model", "normattn.lab.training.step"} <= protocols
    assert not protocols & {*SLOW, "scipy"}
    assert "normattn.lab.report.output" in reports
    assert not reports & {"altair", "vl_convert"}
