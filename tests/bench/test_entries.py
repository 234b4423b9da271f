"""The entries compute what they say: baselines written for the benchmark equal the library."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from normattn import attention
from normattn.bench.attending import Causal, Scored
from normattn.bench.case import Case, Entry, Goal
from normattn.bench.decoding import DecodeStep
from normattn.bench.memory import peak_memory
from normattn.bench.models import SMALL, TrainingStep
from normattn.bench.peers import MaskedALiBi, Stock, TwoMatrices
from normattn.bench.settings import Settings
from normattn.bench.stacks import StackPass
from normattn.bench.suites import SUITES, memory
from normattn.bench.vocabulary import Vocabulary
from normattn.errors import InputError
from normattn.kernels.dispatch import KERNELS
from normattn.lab.runs.timing import Step

DOUBLE = Causal(40, torch.float64, True)
QUICK = Settings.of(quick=True, device="cpu")


def entries() -> list[tuple[str, Entry]]:
    cases = [case for suite in SUITES.values() for case in suite.cases(QUICK)]
    return [(f"{case.name}: {name}", e) for case in cases for name, e in case.entries.items()]


def test_two_full_matrices_are_rerope() -> None:
    q, k, v = DOUBLE.tensors(3)
    ours = attention(q, k, v, "Baseline-ReRoPE(window=16)@32", backend="reference")
    naive = TwoMatrices(DOUBLE, window=16).of(q, k, v)()
    torch.testing.assert_close(naive, ours, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        torch.autograd.grad(naive.sin().sum(), (q, k, v)),
        torch.autograd.grad(ours.sin().sum(), (q, k, v)),
        rtol=1e-8,
        atol=1e-9,
    )


@pytest.mark.parametrize("rope", [False, True])
def test_the_stock_way_is_baseline(rope: bool) -> None:
    """The gradients that a step returns, for one fixed gradient of the output."""
    ours = Scored(DOUBLE, "Baseline" if rope else "Baseline-NoPE").build()()
    stock = Stock(DOUBLE, rope=rope).build()()
    torch.testing.assert_close(ours, stock, rtol=1e-8, atol=1e-9)


def test_the_mask_is_alibi() -> None:
    ours = Scored(DOUBLE, "Baseline-ALiBi").build()()
    fixed = MaskedALiBi(DOUBLE).build()()
    torch.testing.assert_close(ours, fixed, rtol=1e-8, atol=1e-9)
    found: Any = MaskedALiBi(DOUBLE, learned=True).build()()
    *same, by_slopes = found
    torch.testing.assert_close(tuple(same), fixed)
    assert by_slopes.shape == (DOUBLE.heads,)


@pytest.mark.parametrize("length", [1, 40])
def test_plain_decoding_is_baseline_again_and_again(length: int) -> None:
    call = Causal(length, torch.float64, False)
    plain, ours = DecodeStep(call).build(), DecodeStep(call, "Baseline").build()
    first = plain()
    for step in (ours, plain, ours):
        torch.testing.assert_close(step(), first, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_stored_scores_are_carried_ones(causal: bool) -> None:
    """The same gradients of all blocks; without residual scores they are others."""
    ours = StackPass("Baseline-RealFormer", 24, 2, causal, layers=3, width=32)
    stored = StackPass("Baseline-RealFormer", 24, 2, causal, stored=True, layers=3, width=32)
    found, expected = ours.build()(), stored.build()()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    plain: Any = StackPass("Baseline", 24, 2, causal, layers=3, width=32).build()()
    assert (plain[0] - expected[0]).abs().max() > 1e-2  # type: ignore[index]


def test_both_cross_entropies_agree() -> None:
    ours = Vocabulary(30, 50, torch.float64, width=8)
    whole = Vocabulary(30, 50, torch.float64, width=8, chunked=False)
    torch.testing.assert_close(ours.build()(), whole.build()())


def test_work_counts_causal_pairs() -> None:
    work = Causal(4, torch.float32, False, batch=2, heads=3, size=8).work()
    pairs = 2 * 3 * (4 + 3 + 2 + 1)
    assert work.flops == pairs * 2 * 2 * 8
    assert work.exps == pairs
    assert work.bytes == 4 * (2 * 3 * 4 * 8) * 4
    assert (
        Causal(4, torch.float32, True).work().flops
        == 3.5 * Causal(4, torch.float32, False).work().flops
    )


@pytest.mark.parametrize("name", ["normattn", "x-transformers", "transformers"])
def test_a_training_step_begins_near_chance(name: str) -> None:
    pytest.importorskip(name.replace("-", "_"))
    model = TrainingStep(name, size=SMALL).model()  # type: ignore[arg-type]
    loss = model(torch.arange(17)[None])
    assert loss.item() == pytest.approx(math.log(SMALL.vocabulary), rel=0.3)


def test_every_entry_can_be_sent_to_a_process_and_has_a_small_self() -> None:
    for name, entry in entries():
        assert pickle.loads(pickle.dumps(entry)) == entry, name
        assert entry.small().work().flops <= entry.work().flops, name
        assert entry.work().bytes > 0, name


def test_every_kernel_but_the_reference_is_weighed() -> None:
    """What carries scores is weighed with a whole stack, by the suite realformer."""
    (case, *_) = memory.cases(QUICK)
    in_a_stack = {"carried", "concatenated"}
    named = {kernel.name for kernel in KERNELS} - {"reference"} - in_a_stack
    assert set(case.entries) == named | {"SDPA"}


def test_a_case_whose_goals_name_no_entry_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Case("c", {"a": Stock(DOUBLE)}, (Goal("a", "b"),))


@dataclass(frozen=True)
class Hungry:
    """A step that holds some MiB more than it was given."""

    mebibytes: int

    def build(self) -> Step:
        return lambda: torch.ones(self.mebibytes * 2**18).sum()


class Dying:
    """A step that ends its process."""

    def build(self) -> Step:
        raise SystemExit(9)


def test_peak_memory_is_what_the_step_adds() -> None:
    assert peak_memory(Hungry(32).build, warm=Hungry(1).build) == pytest.approx(32, abs=2)


def test_a_process_that_dies_is_told_of() -> None:
    with pytest.raises(InputError, match="ended with code 9"):
        peak_memory(Dying().build)
