"""Starting the toy training as a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def environment(**extra: str) -> dict[str, str]:
    path = os.pathsep.join([str(TESTS.parent / "src"), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


def start(out: Path, options: dict[str, object], **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "training.child", str(out), json.dumps(options)],
        cwd=TESTS,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
