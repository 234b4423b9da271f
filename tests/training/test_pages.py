"""Freed memory that a training keeps comes back without a page fault."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A block as large as a step's tensors, taken, written and freed twice: faults of the second time.
PROGRAM = """
import ctypes, resource, sys
from contextlib import nullcontext
from normattn.lab.runs.environment import keep_pages

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(1 << 24)
    ctypes.memset(block, 1, 1 << 24)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with keep_pages():
    if sys.argv[1] == "inside":
        faults(), print(faults())
if sys.argv[1] == "after":
    faults(), print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(
    ("where", "environment", "kept"),
    [
        ("inside", {}, True),
        ("after", {}, False),
        # Mapped one by one, as asked: each page is a fault (one for 2 MiB where pages are huge).
        ("inside", {"MALLOC_MMAP_THRESHOLD_": "65536"}, False),
    ],
)
def test_a_block_that_was_freed_has_its_pages_still(
    where: str, environment: dict[str, str], kept: bool
) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    own = {**clean, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    program = [sys.executable, "-c", PROGRAM, where]
    ran = subprocess.run(program, env=own, capture_output=True, text=True, check=True)
    # 4,096 pages of 4 KiB or 8 of 2 MiB; what the interpreter touches meanwhile is less.
    assert int(ran.stdout) < 8 if kept else int(ran.stdout) >= 8
