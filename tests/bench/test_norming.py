"""The norms that are timed give the same results and gradients."""

from __future__ import annotations

import pytest
import torch

from normattn.bench.norming import Kind, Norming


@pytest.mark.parametrize(
    ("ours", "peer"), [("LayerNorm", "nn.LayerNorm"), ("RMSNorm", "nn.RMSNorm")]
)
def test_ours_and_torchs_are_timed_on_the_same_work(ours: Kind, peer: Kind) -> None:
    found, expected = (
        Norming(kind, width=16, rows=9, dtype=torch.float64).build()() for kind in (ours, peer)
    )
    torch.testing.assert_close(found, expected)
