"""Two processes at the same global batch give one process's loss curve, up to rounding."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from normattn.errors import InputError
from normattn.lab.runs import read_metrics, read_status
from normattn.lab.training.distributed import choose_device
from normattn.lab.training.loop import train

from .group import fail_on_main, fail_while_others_train, give_what_cannot_travel, together
from .processes import TESTS, environment
from .toy import ToyTask, config, open_run

STEPS = 20


def torchrun(out: Path, options: dict[str, object], *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", *more),
            *("--nproc-per-node", "2", "-m", "training.child", str(out), json.dumps(options)),
        ],
        cwd=TESTS,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def workers(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


def finish(process: subprocess.Popen[str], seconds: float = 60.0) -> str:
    """Wait for torchrun; what hangs is ended, workers too, so that nothing stays behind."""
    try:
        return process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        for pid in [*workers(process.pid), process.pid]:
            os.kill(pid, signal.SIGKILL)
        raise


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out / "metrics.jsonl")]


def test_two_processes_follow_one_and_stop_together(tmp_path: Path) -> None:
    options: dict[str, object] = {"steps": STEPS, "accumulate": 2, "pause": 0.05}
    stopped = torchrun(tmp_path / "two", options)
    assert stopped.stdout is not None
    assert stopped.stdout.readline().strip() == "1"
    # Only one of the two is told to stop; the other must stop at the same step.
    os.kill(workers(stopped.pid)[-1], signal.SIGTERM)
    said = finish(stopped)
    status = read_status(tmp_path / "two")
    assert status is not None, said
    assert status.state == "interrupted", said

    again = torchrun(tmp_path / "two", {**options, "pause": 0.0})
    said = finish(again)
    assert again.returncode == 0, said
    settings = config(steps=STEPS)
    train(ToyTask, settings, open_run(tmp_path / "one", settings), show_progress=False)
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert len(two) == STEPS
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (InputError, "InputError"),
        (KeyError, "RuntimeError"),
        (KeyboardInterrupt, "RuntimeError"),
    ],
)
def test_whatever_fails_on_the_first_process_fails_on_all(
    kind: type[BaseException], others: str
) -> None:
    (own, said), (other, told) = together(2, fail_on_main, kind)
    assert own == kind.__name__
    assert other == others
    assert "the disk is gone" in said
    assert "the disk is gone" in told


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_the_first_process_fails_in_alone_reaches_all(tmp_path: Path, parallel: str) -> None:
    (own, said), (other, told) = together(2, fail_while_others_train, tmp_path / "run", parallel)
    assert (own, other) == ("KeyError", "RuntimeError")
    assert "the disk is gone" in said
    assert "the disk is gone" in told


def test_a_result_that_cannot_be_sent_fails_on_all() -> None:
    for said in together(2, give_what_cannot_travel):
        assert "pickle" in said


def test_a_device_that_is_not_there_is_said() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="CUDA devices"):
        choose_device("cuda:99")
    with pytest.raises(InputError, match="unknown device"):
        choose_device("abacus")
