"""The model under torch.compile: one graph, the same numbers."""

from __future__ import annotations

import apart

# A process of its own, because the checker of shapes in the tests is not made to be traced.
PROGRAM = """
import torch
from normattn import CausalLM, CausalLMConfig

torch.set_num_threads(1)
for block in ({"heads": 2}, {"block": "gau", "key_size": 8}):
    torch.manual_seed(0)
    config = CausalLMConfig(
        vocab_size=16, dim=16, layers=2, train_length=8, score="KNA-logn", **block
    )
    model = CausalLM(config)
    ids = torch.randint(0, 16, (2, 9))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    logits, expected = compiled(ids), model(ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    got = torch.autograd.grad(logits.sin().sum(), list(model.parameters()))
    wanted = torch.autograd.grad(expected.sin().sum(), list(model.parameters()))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    with model.using("YaRN", factor=4):
        torch.testing.assert_close(compiled(ids), model(ids), rtol=0, atol=1e-5)
    torch.testing.assert_close(compiled(ids), expected, rtol=0, atol=1e-5)
"""


def test_compiled_logits_and_gradients_are_the_same() -> None:
    done = apart.run(PROGRAM)
    assert done.code == 0, done.err[-3000:]
