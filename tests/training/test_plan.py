"""What is counted for many devices is what processes here hold, and what can be counted by hand."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from normattn.errors import InputError
from normattn.lab.training.causal import CausalWorkload
from normattn.lab.training.config import TrainingConfig
from normattn.lab.training.counting import Counted
from normattn.lab.training.distribution import World
from normattn.lab.training.measured_step import measured_peak
from normattn.lab.training.plan import DEVICES, HERE, Plan, described, device_named, dry_share, plan
from normattn.lab.training.roofline import Rates
from normattn.lab.training.work import Touch, Work

from .group import CURVE, hold, together
from .rates import RATES, keep, rates_file
from .settings import small

H100 = DEVICES["h100"]


def planned(config: TrainingConfig, nodes: int, per_node: int, name: str = HERE) -> Plan:
    counted = dry_share(config, name, nodes * per_node)
    return plan(config, CausalWorkload().cost(config), counted, H100, nodes, per_node)


@pytest.mark.parametrize(("parallel", "size"), [("ddp", 2), ("fsdp", 2), ("fsdp", 4)])
def test_the_state_is_what_processes_hold(parallel: str, size: int) -> None:
    settings = small(**CURVE, parallel=parallel)
    counted = planned(settings, 1, size)
    held = [held for held, _ in together(size, hold, parallel)]
    assert counted.state == pytest.approx(sum(held) / size, rel=0.03)
    # The first process holds most where rows do not divide.
    assert counted.state == pytest.approx(max(held), rel=0.15)


WIDE: dict[str, Any] = {"dim": 128, "layers": 4, "heads": 4, "train_length": 64, "score": "KNA"}


def hold_at_most(rank: int, config: TrainingConfig) -> int:
    """Bytes at the peak of a step on this process of the group."""
    place = World(rank, dist.get_world_size(), torch.device("cpu"))
    return measured_peak(config, place)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_peak_is_that_of_processes(parallel: str) -> None:
    settings = small(model=WIDE, batch_size=32, parallel=parallel)
    peak = max(together(2, hold_at_most, settings))
    assert planned(settings, 1, 2).memory == pytest.approx(peak, rel=0.1)


def test_bytes_and_times_by_hand() -> None:
    model = {"dim": 8, "layers": 2, "heads": 2, "train_length": 16, "score": "KNA-logn"}
    ddp = small(model=model, batch_size=16)
    cost = CausalWorkload().cost(ddp)
    p, root = cost.parameters, 32 * 8
    product, sum_ = Work(flops=67e9), Work(touched=(Touch(3.35e9, 0.0),))
    counted = Counted(100 * p, 12 * p, Counter({product: 2, sum_: 3}))
    alone = plan(ddp, cost, counted, H100, 1, 1)
    assert (alone.sent, alone.beside, alone.checkpoint) == (0.0, 0.0, 12 * p)
    assert alone.memory == 100 * p
    assert alone.seconds == pytest.approx(5e-3)
    two = plan(ddp, cost, counted, H100, 1, 2)
    assert (two.sent, two.beside, two.state, two.memory) == (4 * p, 4 * p, 16 * p, 104 * p)
    assert two.sending == pytest.approx(4 * p / 450e9)
    fsdp = small(model=model, batch_size=16, parallel="fsdp", precision="bf16", accumulate=2)
    four = plan(fsdp, cost, counted, H100, 2, 2)
    assert four.state == 4 * p
    assert four.memory == four.state + four.beside - 4 * root + 88 * p
    assert four.sent == pytest.approx(2 * 0.75 * (2 * 2 * (p - root) + 4 * root + 4 * p))
    assert four.sending == pytest.approx(four.sent / 50e9)
    assert "2 × 2 h100" in described(four, H100, "h100", 2, 2)
    assert "more than it has" not in described(four, H100, "h100", 2, 2)
    much = plan(ddp, cost, Counted(10**12, 0), H100, 1, 1)
    assert "1e+03 GB of 80 GB each at the peak" in described(much, H100, "h100", 1, 1)
    assert "more than it has" in described(much, H100, "h100", 1, 1)


def test_a_published_device_has_one_rate_of_a_kind() -> None:
    """Of an operation its products or its bytes, whichever take longer; nothing else."""
    rates = Rates.published(10.0, 40.0, 8.0)
    far, near = (Touch(8.0, math.inf),), (Touch(8.0, 1.0),)
    assert rates.of(Work(flops=100.0, touched=far, exponentials=9.0)) == 10.0
    assert rates.of(Work(True, 100.0, near, side=64.0, form="batched")) == 2.5
    assert rates.of(Work(flops=1.0, touched=far, layout="scattered")) == 1.0
    assert rates.of(Work()) == 0.0


def test_a_time_by_hand_from_rates_on_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of five operations: each by its curve, at its size."""
    monkeypatch.setenv("NORMATTN_CACHE", str(tmp_path))
    keep(rates_file(), RATES)
    here = device_named(HERE)
    assert capsys.readouterr().err == ""
    work = Counter(
        {
            Work(): 3,
            Work(flops=1e6, side=100.0): 2,
            Work(True, 1e6, (Touch(6000.0, 1.0),), form="attention"): 1,
            Work(False, 0.0, (Touch(100.0, 1.0), Touch(100.0, 1e9)), 50.0): 1,
            Work(False, 0.0, (Touch(100.0, 1.0),), layout="scattered"): 1,
        }
    )
    # 8 calls; √(1e3 · 1e5) FLOP/s at side 100, between 10 and 1,000; bytes at 1,000 and at 100.
    by_hand = (
        8 * 0.5 + 2 * 1e6 / 1e4 + max(1e6 / 5e5, 6000.0 / 1e3) + 0.1 + 1.0 + 50 / 10 + 100 / 50
    )
    assert here.rates.seconds(Counted(work=work)) == pytest.approx(by_hand)
    assert (here.rates.bandwidth, here.inside) == (100.0, 50.0)


def test_what_cannot_be_counted_is_refused() -> None:
    settings = small()
    with pytest.raises(InputError, match="expected one of a100, h100, h200, here"):
        device_named("abacus")
    with pytest.raises(InputError, match="batch_size 8 does not divide into 3"):
        planned(settings, 1, 3)
