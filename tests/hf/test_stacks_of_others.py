"""Extended models on further stacks: compiled decoding, quantised layers, offload, images, …"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import apart
import normattn
from normattn import InputError

from .families import LENGTH, build, logits, tokens

METHODS: dict[str, dict[str, Any]] = {
    "PI": {"factor": 3},
    "NTK": {"factor": 3},
    "NTK-mixed": {"factor": 3},
    "ABF": {"base": 1e6},
    "YaRN": {"factor": 3},
    "DynamicNTK": {},
    "ReRoPE": {"window": 3},
    "LeakyReRoPE": {"window": 3, "s": 2.0},
    "SelfExtend": {"window": 3, "group": 2},
    "DualChunk": {"size": 6, "local": 2},
    "logn+": {},
}
BOTH = ["YaRN", "ReRoPE"]
"""A method that changes frequencies, and one that changes attention."""

DECODING = """
import json, sys, warnings, torch
import normattn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8,
    initializer_range=0.2,
)
ids = torch.randint(0, 32, (1, 20))

@torch.no_grad()
def decoded(model, run):
    cache = StaticCache(config, max_cache_len=24)
    found = [model(ids[:, :12], past_key_values=cache, use_cache=True).logits]
    for at in range(12, 20):
        found.append(run(
            input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True,
            position_ids=torch.tensor([[at]]),
        ).logits)
    return torch.cat(found, 1)

found = {}
for method, values in json.load(sys.stdin):
    torch.compiler.reset()
    model = LlamaForCausalLM(config).eval()
    with normattn.extend(model, method, **values), torch.no_grad():
        whole = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend="eager")
        found[method] = (decoded(model, compiled) - whole).abs().max().item()
json.dump(found, sys.stdout)
"""


def test_compiled_decoding_with_a_static_cache() -> None:
    """In a process of its own: the run-time type checks of the tests cannot be traced."""
    done = apart.run(DECODING, told=json.dumps(list(METHODS.items())))
    assert done.code == 0, done.err[-2000:]
    found: dict[str, float] = json.loads(done.out)
    assert set(found) == set(METHODS)
    assert max(found.values()) < 1e-4, found


HOOKED = """
import json, sys, warnings, torch
sys.path.insert(0, "tests/..")
import normattn
from tests.hf.tiny import build
warnings.simplefilter("ignore")
torch.set_num_threads(1)
model, other = build("gemma2"), build("llama")
ids = torch.arange(3, 27)[None]
traced = []

def counting(graph, inputs):
    traced.append(1)
    return graph

@torch.no_grad()
def logits(run):
    return run(input_ids=ids, use_cache=False).logits

compiled, unrelated = (torch.compile(each, backend=counting) for each in (model, other))
logits(unrelated)
plain = logits(compiled)
found = {}
for factor in (2, 4):
    with normattn.extend(model, "YaRN", factor=factor):
        found[factor] = (logits(compiled) - logits(model)).abs().max().item()
        found[f"{factor} has an effect"] = float((logits(model) - plain).abs().max() < 1e-3)
found["removed"] = (logits(compiled) - plain).abs().max().item()
traced.clear()
logits(unrelated)
found["unrelated"] = len(traced)
json.dump(found, sys.stdout)
"""


def test_layers_with_hooks_are_compiled_again_and_no_other_model() -> None:
    """Gemma 2's layers within a window share their rotary module with those that are extended."""
    done = apart.run(HOOKED)
    assert done.code == 0, done.err[-2000:]
    found: dict[str, float] = json.loads(done.out)
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("method", BOTH)
def test_continuous_batching_is_left_alone_or_refused(method: str) -> None:
    """Pages of keys are no cache that a method for attention can read."""
    model = build("Llama")
    with normattn.extend(model, method, **METHODS[method]):
        refused = method != "YaRN"
        for name in ("generate_batch", "init_continuous_batching"):
            assert (name in model.__dict__) == refused
        if refused:
            with pytest.raises(InputError, match="continuous batching"):
                model.generate_batch([[3, 4]])
            with pytest.raises(InputError, match="continuous batching"):
                model.init_continuous_batching()
    assert "generate_batch" not in model.__dict__


@pytest.mark.parametrize("method", BOTH)
def test_a_reference_copy_is_made_before_it_is_extended(method: str) -> None:
    """TRL copies the model that it trains: a copy of an extended one is refused."""
    model, ids = build("Llama"), tokens()
    reference = copy.deepcopy(model)
    with normattn.extend(model, method, **METHODS[method]):
        with pytest.raises(InputError, match="cannot be copied"):
            copy.deepcopy(model)
        with normattn.extend(reference, method, **METHODS[method]):
            assert torch.equal(logits(model, ids), logits(reference, ids))
    assert torch.equal(logits(copy.deepcopy(model), ids), logits(model, ids))


class _Int8Linear(nn.Module):
    """A linear map with weights of 8 bits and a scale for each row, as quantisers make."""

    scale: Tensor
    packed: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("packed", (linear.weight.detach() / scale).round().to(torch.int8))
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """x times the widened weights."""
        return nn.functional.linear(x, self.packed.to(x.dtype) * self.scale)


@pytest.mark.parametrize("method", BOTH)
def test_layers_of_quantised_weights_are_extended(method: str) -> None:
    model, ids = build("Llama"), tokens()
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, _Int8Linear(child))
    as_trained = logits(model, ids)
    with normattn.extend(model, method, **METHODS[method]):
        extended = logits(model, ids)
        with torch.no_grad():
            cache = model(ids[:, :-1], use_cache=True).past_key_values
        step = logits(model, ids[:, -1:], past_key_values=cache)
    assert float((extended - as_trained).abs().max()) > 1e-3
    torch.testing.assert_close(step[:, 0], extended[:, -1], rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(model, ids), as_trained)


@pytest.mark.parametrize("method", BOTH)
def test_weights_that_lie_on_a_disk(method: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, whole, ids = build("Llama"), build("Llama"), tokens()
    accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    as_trained = logits(whole, ids)
    with (
        normattn.extend(model, method, **METHODS[method]),
        normattn.extend(whole, method, **METHODS[method]),
    ):
        assert torch.equal(logits(model, ids), logits(whole, ids))
        assert not torch.equal(logits(whole, ids), as_trained)
    assert torch.equal(logits(model, ids), as_trained)


def _fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Any:
    """The rotation as Liger's kernel reads its tables: one contiguous row for each token."""
    assert cos.shape[1] == q.shape[2]
    assert cos.stride(1) == cos.shape[-1]
    rows = torch.arange(q.shape[2]) * cos.stride(1)
    places = rows[:, None] + torch.arange(cos.shape[-1])
    c, s = (table.flatten(1)[:, places][:, None] for table in (cos, sin))

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * c + torch.cat((-second, first), -1) * s

    return rotate(q), rotate(k)


@pytest.mark.parametrize("method", ["YaRN", "ReRoPE", "DynamicNTK"])
def test_a_fused_rotation_as_liger_s(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    model, ids = build("Llama"), tokens()
    with normattn.extend(model, method, **METHODS[method]):
        plain = logits(model, ids)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", _fused)
    with normattn.extend(model, method, **METHODS[method]):
        torch.testing.assert_close(logits(model, ids), plain, rtol=1e-4, atol=1e-4)


def _vision_language(kind: str) -> Any:
    """A tiny Qwen2.5-VL or Qwen3-VL."""
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": LENGTH,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
        "fullatt_block_indexes": [0],
    }
    make: Any = getattr(transformers, f"{kind}Config")
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(
        make(text_config=text, vision_config=vision, pad_token_id=0)
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
@pytest.mark.parametrize("method", [*BOTH, "DynamicNTK"])
def test_the_text_decoder_of_a_vision_language_model(kind: str, method: str) -> None:
    model, ids = _vision_language(kind), tokens()
    as_trained = logits(model, ids)
    with normattn.extend(model, method, **METHODS[method]) as extension:
        assert extension.resolved.extended == (0, 1)
        extended = logits(model, ids, use_cache=False)
        with torch.no_grad():
            cache = model(ids[:, :-1], use_cache=True).past_key_values
        step = logits(model, ids[:, -1:], past_key_values=cache)
        torch.testing.assert_close(step[:, 0], extended[:, -1], rtol=1e-3, atol=1e-3)
    assert float((extended - as_trained).abs().max()) > 1e-3
    assert torch.equal(logits(model, ids), as_trained)


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_positions_of_an_image_are_stretched_or_refused_where_tokens_are_counted(kind: str) -> None:
    model, ids = _vision_language(kind), tokens(1, 6)
    places = torch.arange(6).expand(3, 1, 6).clone()
    places[1:, :, 3:] = 3
    as_trained = logits(model, ids, position_ids=places)
    with normattn.extend(model, "YaRN", factor=4):
        assert float((logits(model, ids, position_ids=places) - as_trained).abs().max()) > 1e-3
    with (
        normattn.extend(model, "ReRoPE", window=3),
        pytest.raises(InputError, match="reads text alone"),
    ):
        logits(model, ids, position_ids=places)


def test_a_training_that_reports_needs_the_trainer(tmp_path: Path) -> None:
    """Weights & Biases and TensorBoard would not see what stands in the history alone."""
    callback = normattn.hf.AttentionCallback()
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[])
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    callback.on_train_begin(arguments, state, control)
    arguments.report_to = ["tensorboard"]
    with pytest.raises(InputError, match="tensorboard"):
        callback.on_train_begin(arguments, state, control)
