"""Peak memory: how much more than what it was given does a step hold at once?"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

from normattn.errors import InputError
from normattn.lab.runs.memory import peak, resident
from normattn.lab.runs.timing import Step, synchronise

_LOADED = [f"normattn.bench.{name}" for name in ("memory", "peers", "vocabulary", "models")]
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h.
_CPU = torch.device("cpu")


def peak_memory(
    make: Callable[[], Step],
    threads: int = 1,
    warm: Callable[[], Step] | None = None,
    device: str = "cpu",
) -> float:
    """MiB by which two calls of `make()` raise the peak over what stands once it is built.

    On a CPU: of a fresh process, by the kernel's own high-water mark (Linux); `warm` is built and
    called twice before, so that what libraries load, compile and keep for it does not count. On
    a GPU: of torch's allocator in this process. Raises `InputError` where the system keeps no mark.
    """
    if device != "cpu":
        return _on_device(make, device)
    if resident(_CPU) is None:
        raise InputError("peak memory is kept by Linux alone, which this system is not")
    # Children of a server that has torch loaded but has never run it: fresh, and quick to start.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(make, warm, threads, send), daemon=True)
    child.start()
    # The child's end must close with the child, or a child that died would be waited for for ever.
    send.close()
    try:
        mebibytes = float(receive.recv())
    except EOFError as error:
        child.join()
        raise InputError(
            f"the process whose peak memory was measured ended with code {child.exitcode}; "
            "it may have had too little memory"
        ) from error
    finally:
        child.join(timeout=5)
        child.kill()
    return mebibytes


def _in_child(
    make: Callable[[], Step], warm: Callable[[], Step] | None, threads: int, send: Any
) -> None:
    torch.set_num_threads(threads)
    _keep_nothing()
    if warm is not None:
        before_that = warm()
        before_that()
        before_that()
        del before_that
    step = make()
    _give_back()
    with peak(_CPU, resident(_CPU)) as grown:
        step()
        step()
    send.send(grown[0] / 2**20)


def _keep_nothing() -> None:
    """Let glibc take every tensor from the system and give it back when it is freed.

    Otherwise it keeps freed blocks of a size that earlier frees have taught it, and the peak tells
    of that history.
    """
    with contextlib.suppress(OSError, AttributeError):  # Another C library than glibc.
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**16)


def _give_back() -> None:
    """Return freed memory to the system: what the allocator keeps would hide the step's own."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _on_device(make: Callable[[], Step], device: str) -> float:
    step = make()
    step()  # Workspaces of the libraries stay, and are no part of the step.
    synchronise(device)
    gpu = torch.device(device)
    with peak(gpu, resident(gpu)) as grown:
        step()
        step()
        synchronise(device)
    return grown[0] / 2**20
