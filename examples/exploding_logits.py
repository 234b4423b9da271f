"""Attention logits explode at a high learning rate; normalised queries and keys keep them small.

Two small models learn Python source, byte by byte, at ten times a usual learning rate.
One has plain attention, the other normalises queries and keys (QKRMSNorm).

Run it: `python examples/exploding_logits.py` (a quarter of a minute on one core).
"""

from __future__ import annotations

import torch

import normattn
from normattn.lab.demo import demo_text
from normattn.lab.diagnostics import inspect_model
from normattn.lab.diagnostics.inspection import by_head

TOKENS, ROWS = 64, 8


def train(score: str, steps: int = 75, rate: float = 3e-2) -> tuple[float, float]:
    """The last loss in nats, and the largest logit of any head."""
    torch.manual_seed(0)
    config = normattn.CausalLMConfig(
        vocab_size=256, dim=64, layers=3, heads=2, score=score, train_length=TOKENS
    )
    model = normattn.CausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    text = torch.tensor(list(demo_text().encode()[:200_000]))
    for _ in range(steps):
        starts = torch.randint(len(text) - TOKENS - 1, (ROWS,))
        ids = torch.stack([text[start : start + TOKENS + 1] for start in starts])
        loss = model.loss(ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    statistics = inspect_model(model, ids)
    largest = max(by_head(statistics, "largest", layer=layer).max() for layer in range(3))
    return loss.item(), float(largest)


def main() -> None:
    """Train both models and compare their largest logits."""
    logits = {}
    for score in ("Baseline", "QKRMSNorm"):
        loss, logits[score] = train(score)
        print(f"{score:10} loss {loss:.2f} nats, largest logit {logits[score]:,.0f}")
    assert logits["QKRMSNorm"] < 50 < logits["Baseline"]


if __name__ == "__main__":
    main()
