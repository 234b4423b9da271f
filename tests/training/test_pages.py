"""Freed memory that is kept comes back without a fault; what the environment says is left alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A block as large as a step's tensors, taken, written and freed twice: faults of the second time.
# With a training before it, which must leave the process as it was, or with what commands ask for.
PROGRAM = """
import ctypes, pathlib, resource, sys, tempfile
from normattn.lab.training.loop import train
from normattn.lab.runs.environment import keep_pages
from training.toy import ToyTask, config, open_run

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def taken():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(1 << 24)
    ctypes.memset(block, 1, 1 << 24)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def faults():
    taken()
    print(taken())

if sys.argv[1] == "train":
    with tempfile.TemporaryDirectory() as folder:
        settings = config(steps=6)
        run = open_run(pathlib.Path(folder, "run"), settings)
        train(ToyTask, settings, run, show_progress=False)
        faults()
else:
    with keep_pages():
        if sys.argv[1] == "keep":
            faults()
    if sys.argv[1] == "after":
        faults()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_block_that_was_freed_has_its_pages_still() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def again(what: str = "keep", **more: str) -> int:
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, what],
            env={**clean, "PYTHONPATH": os.pathsep.join(sys.path), **more},
            capture_output=True,
            text=True,
            check=True,
        )
        return int(ran.stdout)

    assert again() < 100
    assert again("train") >= 8
    assert again("after") >= 8
    # Mapped one by one, as asked: each page is a fault (one for 2 MiB where pages are huge).
    assert again(MALLOC_MMAP_THRESHOLD_="65536") >= 8
