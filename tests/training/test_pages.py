"""Freed memory that is kept comes back without a fault; what the environment says is left alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A block as large as a step's tensors, taken, written and freed twice: faults of the second time.
PROGRAM = """
import ctypes, resource
from normattn.lab.training.pages import keep_pages

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def taken():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(1 << 24)
    ctypes.memset(block, 1, 1 << 24)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_pages()
taken()
print(taken())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_block_that_was_freed_has_its_pages_still() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def again(**more: str) -> int:
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**clean, **more},
            capture_output=True,
            text=True,
            check=True,
        )
        return int(ran.stdout)

    assert again() < 100
    # Mapped one by one, as asked: each page is a fault (one for 2 MiB where pages are huge).
    assert again(MALLOC_MMAP_THRESHOLD_="65536") >= 8
