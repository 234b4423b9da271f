"""A model that was compiled before it is extended reads as extended, and as before once removed.

In a process of its own: the run-time type checks of the tests cannot be traced.
"""

from __future__ import annotations

import json

import apart

PROGRAM = """
import json, sys, warnings, torch
import normattn
from transformers import LlamaConfig, LlamaForCausalLM
warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
    initializer_range=0.2,
)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(0, 32, (1, 24))

@torch.no_grad()
def logits(run):
    return run(input_ids=ids, use_cache=False).logits

compiled = torch.compile(model, backend="eager")
def whole_step(input_ids, use_cache):
    return model(input_ids=input_ids, use_cache=use_cache)
caller = torch.compile(whole_step, backend="eager")

def off(expected):
    return [(logits(run) - expected).abs().max().item() for run in (compiled, caller)]

found, before = {}, logits(model)
errors = off(before)
for method, values in json.load(sys.stdin).items():
    with normattn.extend(model, method, **values):
        extended = logits(model)
        errors += off(extended)
    # What is compiled here, with the method removed, is what stands when the next is put on.
    errors += off(before)
    found[method] = (max(errors), (extended - before).abs().max().item())
    errors = []
json.dump(found, sys.stdout)
"""
# One for each way in: other embeddings, attention of our own beside them, and inside it.
METHODS = {
    "PI": {"factor": 4},
    "YaRN-logn+": {"factor": 4},
    "ReRoPE": {"window": 4},
}


def test_a_compiled_model_is_extended_and_given_back() -> None:
    done = apart.run(PROGRAM, told=json.dumps(METHODS))
    assert done.code == 0, done.err[-2000:]
    found: dict[str, tuple[float, float]] = json.loads(done.out)
    assert set(found) == set(METHODS)
    for method, (off, effect) in found.items():
        assert off < 1e-5, (method, off)
        assert effect > 1e-3, (method, "changes nothing, so that this shows nothing")
