"""The same failure in a model of transformers, and its rescue by `normattn.extend`.

The shipped model becomes a `LlamaForCausalLM`. An extended model can still be saved, trained and
used for generation; `remove()` restores its logits bit for bit.

Run it: `python examples/rescue_llama.py` (some seconds on one core; needs `normattn[hf]`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import normattn
from normattn.hf import to_llama
from normattn.lab.demo import demo_model, demo_windows


def loss(model: Any, ids: Tensor, last: int = 128) -> float:
    """Mean loss in nats of the last tokens of each row."""
    logits = model(ids[:, :-1]).logits[:, -last:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -last:].flatten()).item()


@torch.inference_mode()
def main() -> None:
    """Evaluate 128 tokens, then 1,024, then 1,024 with YaRN."""
    llama = to_llama(demo_model("Baseline")).eval()
    ids = torch.from_numpy(demo_windows(windows=2))
    print(f"{type(llama).__name__}, trained on {llama.config.max_position_embeddings} tokens")
    print(f"  the last 128 tokens alone:     {loss(llama, ids[:, -129:]):.2f} nats")
    collapsed = loss(llama, ids)
    print(f"  the same, after 896 others:    {collapsed:.2f}")

    extension = normattn.extend(llama, "YaRN", factor=8)
    rescued = loss(llama, ids)
    print(f"  extended with YaRN:            {rescued:.2f}")
    assert rescued < collapsed

    extension.remove()
    assert loss(llama, ids) == collapsed, "the method left something behind"


if __name__ == "__main__":
    main()
