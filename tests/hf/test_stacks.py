"""Extended and observed models on the stacks that people use: autocast, Trainer, compilers, …"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import apart
import normattn
from normattn import InputError
from normattn.lab.diagnostics.lines import read_diagnostics
from thorough import half_of

from . import tiny
from .families import LENGTH, build, logits, model_of, tokens

FREQUENCIES: dict[str, dict[str, Any]] = {
    **{key: {"factor": 3} for key in ("PI", "NTK", "NTK-mixed", "YaRN")},
    "ABF": {"base": 1e6},
}
ATTENTION: dict[str, dict[str, Any]] = {
    "ReRoPE": {"window": 3},
    "LeakyReRoPE": {"window": 3, "s": 2.0},
    "SelfExtend": {"window": 3, "group": 2},
    "DynamicNTK": {},
    "DualChunk": {"size": 6, "local": 2},
    "logn+": {},
    "YaRN-logn+": {"factor": 3},
}
METHODS = FREQUENCIES | ATTENTION
FOUND = "attention_largest"
BOTH = ["YaRN", "ReRoPE"]
"""A method that changes frequencies, and one that changes attention."""


@pytest.mark.parametrize("method", ["ReRoPE", "DynamicNTK", "DualChunk", "YaRN-logn+", "YaRN"])
def test_autocast_gives_what_float32_gives_rounded(method: str) -> None:
    model, ids = model_of("Qwen3"), tokens()
    with normattn.extend(model, method, **METHODS[method]):
        exact = logits(model, ids)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            rounded = logits(model, ids)
            cache = model(ids[:, :-1], use_cache=True).past_key_values
            step = model(ids[:, -1:], past_key_values=cache, use_cache=True).logits
    off = (rounded.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(off.median()) < 3e-2
    assert float((step[0, 0] - exact[0, -1]).norm() / exact[0, -1].norm()) < 5e-2


def _trainer(folder: Path, model: Any, *callbacks: Any, **more: Any) -> Any:
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens(rows=4)]
    return transformers.Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks))


class _Logged(transformers.TrainerCallback):
    """What a reporting integration is told."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep it."""
        self.logs.append({**logs, "step": state.global_step})


@pytest.mark.parametrize("bf16", [False, True])
def test_the_trainer_logs_the_largest_logit_of_an_undisturbed_training(
    tmp_path: Path, bf16: bool
) -> None:
    logged, weights = _Logged(), []
    for observed in (False, True):
        trainer = _trainer(tmp_path, build("Llama"), logged, bf16=bf16)
        if observed:
            trainer.add_callback(normattn.hf.AttentionCallback(every=1, trainer=trainer))
        trainer.train()
        weights.append([weight.clone() for weight in trainer.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    name = "model.layers.0.self_attn"
    told = {x["step"]: x[f"{FOUND}/{name}"] for x in logged.logs if f"{FOUND}/{name}" in x}
    history = [x for x in trainer.state.log_history if f"{FOUND}/{name}" in x]
    assert told == {x["step"]: x[f"{FOUND}/{name}"] for x in history}
    lines = read_diagnostics(tmp_path)
    assert [line.step for line in lines] == [1, 2]
    for line in lines:
        assert max(x for x in line.layers[name].largest if x is not None) == told[line.step]


def test_an_extended_model_is_trained_by_the_trainer(tmp_path: Path) -> None:
    model = build("Llama")
    before = model.lm_head.weight.clone()
    callback = normattn.hf.AttentionCallback(every=1)
    with normattn.extend(model, "ReRoPE", window=3):
        trainer = _trainer(tmp_path, model, callback, bf16=True, gradient_checkpointing=True)
        trainer.train()
    assert not torch.equal(model.lm_head.weight, before)
    assert "attention_largest/model.layers.1.self_attn" in trainer.state.log_history[0]


def test_a_training_that_fails_is_no_longer_observed(tmp_path: Path) -> None:
    model = build("Llama")
    trainer = _trainer(tmp_path, model, normattn.hf.AttentionCallback(every=1))
    hook = model.lm_head.register_forward_pre_hook(lambda *_: torch.zeros(1, 3))
    with pytest.raises(RuntimeError):
        trainer.train()
    hook.remove()
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_hooks


def test_a_callback_that_would_be_silent_is_refused() -> None:
    """Weights & Biases and TensorBoard would not see what stands in the history alone."""
    arguments = transformers.TrainingArguments(report_to=[])
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    callback = normattn.hf.AttentionCallback()
    callback.on_train_begin(arguments, state, control)
    arguments.report_to = ["tensorboard"]
    with pytest.raises(InputError, match="tensorboard"):
        callback.on_train_begin(arguments, state, control)
    for wrong in ({"every": 0}, {"every": True}, {"trainer": 3}):
        with pytest.raises(InputError, match=r"every|trainer"):
            normattn.hf.AttentionCallback(**wrong)


HELD = """
import gc, json, sys, weakref
import torch, normattn
from normattn.hf.observe import collect_statistics
from transformers import LlamaConfig, LlamaForCausalLM

def score_of(model):
    normattn.score_of(model)

def extend(model):
    with normattn.extend(model, "ReRoPE-logn+", window=4):
        model(torch.arange(12)[None])

def observe(model):
    with collect_statistics(model):
        model(torch.arange(12)[None])

held = [normattn.hf.AttentionCallback.__name__]  # as README names it, without another import
for use in (score_of, extend, observe):
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16,
    )).eval()
    weight = weakref.ref(model.model.layers[0].self_attn.q_proj.weight)
    use(model)
    del model
    gc.collect()
    held += [use.__name__] if weight() is not None else []
json.dump(held, sys.stdout)
"""


def test_nothing_holds_a_model_that_was_read() -> None:
    """In a process of its own: the run-time type checks of the tests keep frames."""
    done = apart.run(HELD)
    assert done.code == 0, done.err[-2000:]
    assert json.loads(done.out) == ["AttentionCallback"]


@pytest.mark.parametrize("method", ["ReRoPE", "logn+"])
def test_arguments_that_would_be_ignored_are_refused(method: str) -> None:
    model, ids = model_of("Llama"), tokens(1)
    ends = torch.tensor([0, 10, ids.shape[1]], dtype=torch.int32)
    with normattn.extend(model, method, **METHODS[method]):
        plain = logits(model, ids)
        for name, value in {"cu_seq_lens_q": ends, "max_length_k": 14, "bias": ends}.items():
            with pytest.raises(InputError, match=name):
                logits(model, ids, **{name: value})
        # What a Trainer adds reaches attention too, and asks nothing of it.
        assert torch.equal(logits(model, ids, num_items_in_batch=3), plain)


@pytest.mark.parametrize("method", ["ReRoPE", "SelfExtend", "logn+", "YaRN"])
def test_documents_packed_by_their_position_ids(method: str) -> None:
    model, ids = model_of("Llama"), tokens(1)
    lengths = [10, ids.shape[1] - 10]
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    with normattn.extend(model, method, **METHODS[method]):
        packed = logits(model, ids, position_ids=places, use_cache=False)
        alone = [logits(model, part) for part in torch.split(ids, lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)
    assert max(lengths) > LENGTH


RECOMPUTED = ("granitemoehybrid", "zaya", "qwen4_exp_text", "gemma3_text")


@pytest.mark.parametrize(("family", "method"), half_of(RECOMPUTED, BOTH))
def test_recomputed_activations_give_the_same_gradients(family: str, method: str) -> None:
    model, ids = tiny.build(family).train(), tokens(1, 12)
    found = []
    with normattn.extend(model, method, **METHODS[method]):
        for recompute in (False, True):
            if recompute:
                newer = getattr(model, "activation_checkpointing_enable", None)
                (newer or model.gradient_checkpointing_enable)()
            model.zero_grad()
            torch.manual_seed(0)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            grads = (weight.grad for weight in model.parameters())
            found.append([grad.clone() for grad in grads if grad is not None])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_edits_of_the_configuration_outlive_the_extension() -> None:
    model = build("Llama")
    config = model.config
    with normattn.extend(model, "YaRN-logn+", factor=4):
        model.resize_token_embeddings(70)
        model.config.use_cache = False
        model.config.pad_token_id = 3
    assert model.config is config
    assert (config.vocab_size, config.use_cache, config.pad_token_id) == (70, False, 3)
    assert model.lm_head.weight.shape[0] == 70
    assert config.max_position_embeddings == LENGTH
    assert config.rope_parameters["rope_type"] == "default"
    assert not hasattr(config, "normattn")


def test_frequencies_are_kept_in_float32_when_the_model_is_cast() -> None:
    model, ids = build("Llama"), tokens()
    rotary = model.model.rotary_emb
    own = rotary.inv_freq.clone()
    with normattn.extend(model, "YaRN", factor=3):
        extended = logits(model, ids)
        scaled = rotary.inv_freq.clone()
        model.to(torch.bfloat16)
        assert torch.equal(rotary.inv_freq, scaled)
        rounded = logits(model, ids).float()
        model.float()
    assert float((rounded - extended).norm() / extended.norm()) < 4e-2
    assert torch.equal(rotary.inv_freq, own)


def test_an_extension_reads_the_model_twice() -> None:
    """From a disk, where the weights do not fit into memory, each forward is a pass over it."""
    model, runs = build("Llama"), []
    model.lm_head.register_forward_hook(lambda *_: runs.append(1))
    for method, values in METHODS.items():
        runs.clear()
        normattn.extend(model, method, **values).remove()
        assert len(runs) == 2, method


COMPILED = """
import json, sys, warnings, torch
sys.path.insert(0, "tests/..")
import normattn
from tests.hf.tiny import build
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
torch._dynamo.config.recompile_limit = 256  # beyond its limit a model is run as it is
config = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8,
    initializer_range=0.2,
)
model, other = LlamaForCausalLM(config).eval(), torch.nn.Linear(2, 2)
kinds = ["full_attention", "sliding_attention"]
# Layers within a window share the rotary module of those extended.
hooked = build("qwen2", use_sliding_window=True, sliding_window=6, layer_types=kinds)
ids = torch.randint(3, 32, (1, 12))
traced, found = [], {}

def counting(graph, inputs):
    traced.append(1)
    return graph

@torch.no_grad()
def logits(run):
    return run(input_ids=ids, use_cache=False).logits

@torch.no_grad()
def decoded(model, run):
    cache = StaticCache(config, max_cache_len=16)
    steps = [model(ids[:, :10], past_key_values=cache, use_cache=True).logits]
    for at in (10, 11):
        steps.append(run(
            input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True,
            position_ids=torch.tensor([[at]]),
        ).logits)
    return torch.cat(steps, 1)

def off(one, other):
    return (one - other).abs().max().item()

compiled, unrelated, hooks = (torch.compile(x, backend=counting) for x in (model, other, hooked))
unrelated(torch.zeros(2))
plain, plain_hooked = logits(compiled), logits(hooks)
methods, factors, alone = json.load(sys.stdin)
for method, values in methods:
    with normattn.extend(compiled, method, **values):
        extended, before = logits(model), len(traced)
        found[f"{method} {values}"] = off(logits(compiled), extended)
        if f"{method} is compiled" not in found:
            found[f"{method} is compiled"] = float(len(traced) == before)
            # Under frequencies alone it is transformers' own attention that decodes.
            if method not in alone:
                found[f"{method} is decoded"] = off(decoded(model, compiled), extended)
        found[f"{method} {values} has an effect"] = float(off(extended, plain) < 1e-4)
found["removed"] = off(logits(compiled), plain)
for factor in factors:
    with normattn.extend(hooked, "YaRN", factor=factor):
        before = len(traced)
        found[f"hooks {factor}"] = off(logits(hooks), logits(hooked))
        found[f"hooks {factor} are compiled"] = float(len(traced) == before)
found["hooks removed"] = off(logits(hooks), plain_hooked)
traced.clear()
unrelated(torch.zeros(2))
found["an unrelated model"] = len(traced)
json.dump(found, sys.stdout)
"""


def test_a_compiled_model_is_extended_by_every_method(thorough: bool) -> None:
    """Read, decoded with a static cache and given back; no other model is compiled again.

    In a process of its own: the run-time type checks of the tests cannot be traced.
    """
    every = [*ATTENTION.items(), ("ReRoPE", {"window": 7}), ("YaRN", {"factor": 2})]
    # Each way of changing a model, and one way with two settings.
    chosen = ("ReRoPE", "DynamicNTK", "YaRN")
    methods = [each for each in every if thorough or each[0] in chosen]
    factors = (2, 4) if thorough else (2,)
    done = apart.run(COMPILED, told=json.dumps([methods, factors, [*FREQUENCIES]]))
    assert done.code == 0, done.err[-2000:]
    found: dict[str, float] = json.loads(done.out)
    asked = {f"{name} is compiled" for name, _ in methods}
    asked |= {f"{name} is decoded" for name, _ in methods if name in ATTENTION}
    assert asked <= set(found)
    assert max(found.values()) < 1e-4, found


def test_continuous_batching_is_refused_by_transformers() -> None:
    """Pages of keys are no cache that a method for attention can read."""
    model = build("Llama")
    with (
        normattn.extend(model, "ReRoPE", window=3),
        pytest.raises(ValueError, match="not supported for continuous batching"),
    ):
        model.generate_batch([[3, 4]])


def _assert_extended(model: Any, ids: Tensor, method: str) -> None:
    """A method has an effect, decodes as it reads, and is undone to the last bit."""
    as_trained = logits(model, ids)
    with normattn.extend(model, method, **METHODS[method]):
        extended = logits(model, ids, use_cache=False)
        with torch.no_grad():
            cache = model(ids[:, :-1], use_cache=True).past_key_values
        step = logits(model, ids[:, -1:], past_key_values=cache)
    assert float((extended - as_trained).abs().max()) > 1e-3
    torch.testing.assert_close(step[:, 0], extended[:, -1], rtol=1e-3, atol=1e-3)
    assert torch.equal(logits(model, ids), as_trained)


@pytest.mark.parametrize("method", BOTH)
def test_weights_that_lie_on_a_disk(method: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, whole, ids = build("Llama"), build("Llama"), tokens()
    accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    with (
        normattn.extend(model, method, **METHODS[method]),
        normattn.extend(whole, method, **METHODS[method]),
    ):
        assert torch.equal(logits(model, ids), logits(whole, ids))
    assert torch.equal(logits(model, ids), logits(whole, ids))
    with torch.device("meta"):
        empty = type(whole)(whole.config)
    with pytest.raises(InputError, match="on the meta device"):
        normattn.extend(empty, method, **METHODS[method])


def _fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Any:
    """The rotation as Liger's kernel reads its tables: one contiguous row for each token."""
    assert cos.shape[1] == q.shape[2]
    assert cos.is_contiguous()
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
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    length = {"vocab_size": 64, "max_position_embeddings": LENGTH, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    blocks = {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}
    make: Any = getattr(transformers, f"{kind}Config")
    torch.manual_seed(7)
    config = make(
        text_config={**sizes, **heads, **length},
        vision_config={**vision, **blocks, "out_hidden_size": 32},
        pad_token_id=0,
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.3)
    return model


@pytest.mark.parametrize(
    ("kind", "method"), half_of(("Qwen2_5_VL", "Qwen3VL"), (*BOTH, "DynamicNTK"))
)
def test_the_text_decoder_of_a_vision_language_model(kind: str, method: str) -> None:
    """Positions of an image are scaled, or refused where tokens are counted."""
    model = _vision_language(kind)
    _assert_extended(model, tokens(), method)
    ids, places = tokens(1, 6), torch.arange(6).expand(3, 1, 6).clone()
    places[1:, :, 3:] = 3
    as_trained = logits(model, ids, position_ids=places)
    with normattn.extend(model, method, **METHODS[method]):
        if method == "YaRN":
            assert float((logits(model, ids, position_ids=places) - as_trained).abs().max()) > 1e-3
            return
        with pytest.raises(InputError, match="takes only text"):
            logits(model, ids, position_ids=places)


def test_the_score_of_an_extended_model_is_not_read() -> None:
    model = model_of("Llama")
    with normattn.extend(model, "ReRoPE", window=3), pytest.raises(InputError, match="remove"):
        normattn.score_of(model)
    assert normattn.score_of(model).verified
    counts: tuple[Any, ...] = (1, True, 2.5)
    for count in counts:
        with pytest.raises(InputError, match="tokens must be a whole number of at least 2"):
            normattn.score_of(model, tokens=count)
