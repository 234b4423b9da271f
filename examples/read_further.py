"""A model trained on 128 tokens fails on 1,024, and a method rescues it.

The model ships with the package: plain RoPE, 1.4 million parameters. A method is switched on and
off without touching a weight.

Run it: `python examples/read_further.py` (some seconds on one core).
"""

from __future__ import annotations

import torch
from torch import Tensor

from normattn import CausalLM
from normattn.lab.demo import demo_model, demo_windows

TRAINED = 128


def losses(model: CausalLM, ids: Tensor) -> tuple[float, float]:
    """Mean loss in nats of the first 128 tokens, and of the last 128."""
    logits = model(ids[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return loss[:, :TRAINED].mean().item(), loss[:, -TRAINED:].mean().item()


@torch.inference_mode()
def main() -> None:
    """Evaluate the same windows unmodified and with three methods."""
    model = demo_model("Baseline")
    ids = torch.from_numpy(demo_windows(windows=2))
    before = losses(model, ids)
    print(f"unmodified:  {before[0]:.2f} nats at the start, {before[1]:.2f} at the end")

    for method in ("NTK(factor=8)", "YaRN(factor=8)", "ReRoPE"):
        handle = model.using(method)
        near, far = losses(model, ids)
        handle.remove()
        print(f"with {method}: {near:.2f} at the start, {far:.2f} at the end")
        assert far < before[1], "the method did not help"

    assert losses(model, ids) == before, "the method left something behind"


if __name__ == "__main__":
    main()
