"""Train a tiny model on 16 tokens and read 64 with it: as it is, and with methods switched on.

The text repeats four words in an order of its own, so what the next token is stands in the context.
A method is switched on and off without touching a weight.

Run it: `python examples/read_further.py` (some seconds on one core).
"""

from __future__ import annotations

import torch
from torch import Tensor

import normattn

WORDS, TRAINED, READ = 12, 16, 64


def texts(number: int, tokens: int, seed: int) -> Tensor:
    """Rows of ids (number, tokens + 1): four words of each row's own, over and over."""
    random = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(WORDS, generator=random)[:4] for _ in range(number)])
    return order.repeat(1, tokens // 4 + 1)[:, : tokens + 1]


def loss(model: normattn.CausalLM, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in nats."""
    logits = model(ids[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def main(steps: int = 60) -> None:
    """Train, then read."""
    torch.manual_seed(0)
    config = normattn.CausalLMConfig(
        vocab_size=WORDS, dim=32, layers=2, heads=2, score="KNA-logn", train_length=TRAINED
    )
    model = normattn.CausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = loss(model, texts(32, TRAINED, 0)).item()
    for step in range(steps):
        optimiser.zero_grad()
        loss(model, texts(16, TRAINED, step + 1)).backward()
        optimiser.step()
    model.eval()
    with torch.no_grad():
        after = loss(model, texts(32, TRAINED, 0)).item()
        print(f"{TRAINED} tokens: {before:.2f} nats before training, {after:.2f} after")
        assert after < before
        plain = loss(model, texts(32, READ, 0))
        print(f"{READ} tokens as it is: {plain:.2f}")
        for method in ("NTK", "YaRN", "ReRoPE"):
            handle = model.using(method, **({} if method == "ReRoPE" else {"factor": 4}))
            print(f"{READ} tokens with {method}: {loss(model, texts(32, READ, 0)):.2f}")
            handle.remove()
        assert torch.equal(loss(model, texts(32, READ, 0)), plain), "the method left something"


if __name__ == "__main__":
    main()
