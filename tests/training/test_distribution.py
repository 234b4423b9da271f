"""Two processes at the same global batch give one process's loss curve, up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normattn.errors import InputError, Interrupted
from normattn.lab.runs import read_metrics, read_status
from normattn.lab.training.distributed import choose_device

from .group import CURVE, STEPS, fail_on_main, fail_while_others_train, go, together


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out / "metrics.jsonl")]


def test_two_processes_follow_one_and_stop_together(tmp_path: Path) -> None:
    """Only one of the two is asked to stop; the other must stop at the same step."""
    two, one = tmp_path / "two", tmp_path / "one"
    changes = {**CURVE, "accumulate": 2}
    said = together(2, go, two, changes, 5)
    assert [kind for kind, _ in said] == [Interrupted] * 2, said
    status = read_status(two)
    assert status is not None
    assert (status.state, status.step) == ("interrupted", 5)
    together(2, go, two, changes)
    go(0, one, CURVE)
    assert len(losses(two)) == STEPS
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "others"),
    [(InputError, "InputError"), (KeyboardInterrupt, "RuntimeError")],
)
def test_whatever_fails_on_the_first_process_fails_on_all(
    kind: type[BaseException], others: str
) -> None:
    (own, said), (other, told) = together(2, fail_on_main, kind)
    assert (own, other) == (kind.__name__, others)
    assert "the disk is gone" in said
    assert "the disk is gone" in told


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_the_first_process_fails_in_alone_reaches_all(tmp_path: Path, parallel: str) -> None:
    (own, said), (other, told) = together(2, fail_while_others_train, tmp_path / "run", parallel)
    assert (own, other) == ("KeyError", "RuntimeError")
    assert "the disk is gone" in said
    assert "the disk is gone" in told


def test_a_device_that_is_not_there_is_said() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="CUDA devices"):
        choose_device("cuda:99")
    with pytest.raises(InputError, match="unknown device"):
        choose_device("abacus")
