"""A custom score component: keys of length c, s(i, j) = c·⟨q_i, k_j / ‖k_j‖⟩.

Once registered, its name works everywhere: in specifications, models and tables.

Run it: `python examples/own_score.py`.
"""

from __future__ import annotations

import torch

import normattn
from normattn.score.parts import Variant, number, register


@register
class KeysOfLength(Variant):
    """Keys of length c; c = 1 is KeyNorm."""

    equation = "s = c·⟨q, k/‖k‖⟩"
    source = "an example"
    sides = "K"
    c: float = number(default=2.0, above=0)

    def base(self, head_dim: int, train_length: int | None) -> float:
        """c, in place of 1/√d."""
        return self.c


def main() -> None:
    """Use it alone and with a method; its limit c = 1 is KeyNorm."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 64, 16)
    spec = normattn.ScoreSpec.parse("KeysOfLength(c=3)-logn-YaRN", train_length=16, factor=4)
    out = normattn.attention(q, k, v, spec)
    torch.testing.assert_close(out, normattn.attention(q, k, v, spec, backend="reference"))
    key_norm = normattn.attention(q, k, v, "KeysOfLength(c=1)")
    torch.testing.assert_close(key_norm, normattn.attention(q, k, v, "KNA"))
    print(normattn.explain(spec, q.shape))


if __name__ == "__main__":
    main()
