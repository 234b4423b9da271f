"""Extended and observed models on the stacks that people use: autocast, Trainer, memory, …"""

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

from . import tiny
from .families import LENGTH, build, logits, model_of, tokens

ATTENTION: dict[str, dict[str, Any]] = {
    "ReRoPE": {"window": 3},
    "LeakyReRoPE": {"window": 3, "s": 2.0},
    "SelfExtend": {"window": 3, "group": 2},
    "DynamicNTK": {},
    "DualChunk": {"size": 6, "local": 2},
    "logn+": {},
    "YaRN-logn+": {"factor": 3},
}
"""Methods that replace the attention of a model."""


@pytest.mark.parametrize("method", [*ATTENTION, "YaRN"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_autocast_gives_what_float32_gives_rounded(family: str, method: str) -> None:
    model, ids = model_of(family), tokens()
    values = ATTENTION.get(method, {"factor": 3})
    with normattn.extend(model, method, **values):
        exact = logits(model, ids)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = logits(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        own = logits(model, ids) - logits(model, ids).float()
    assert own.isfinite().all()
    off = (rounded.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(off.median()) < 3e-2


def test_autocast_decodes_with_a_cache() -> None:
    model, ids = model_of("Llama"), tokens(1)
    with normattn.extend(model, "ReRoPE-logn+", window=3), torch.autocast("cpu", torch.bfloat16):
        whole = logits(model, ids)
        with torch.no_grad():
            cache = model(ids[:, :-1], use_cache=True).past_key_values
            step = model(ids[:, -1:], past_key_values=cache, use_cache=True).logits
    assert float((step[0, 0] - whole[0, -1]).norm() / whole[0, -1].norm()) < 5e-2


def test_gradients_under_autocast() -> None:
    model, ids = build("Llama").train(), tokens()
    with normattn.extend(model, "ReRoPE-logn+", window=3):
        found = []
        for enabled in (False, True):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                model(ids, labels=ids).loss.backward()
            found.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 0.1


class _Logged(transformers.TrainerCallback):
    """What a reporting integration is told."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep it."""
        self.logs.append({**logs, "step": state.global_step})


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


@pytest.mark.parametrize("bf16", [False, True])
def test_the_trainer_logs_the_largest_logit(tmp_path: Path, bf16: bool) -> None:
    logged = _Logged()
    trainer = _trainer(tmp_path, build("Llama"), logged, bf16=bf16)
    trainer.add_callback(normattn.hf.AttentionCallback(every=1, trainer=trainer))
    trainer.train()
    name = "attention_largest/model.layers.0.self_attn"
    told = {each["step"]: each[name] for each in logged.logs if name in each}
    history = {each["step"]: each[name] for each in trainer.state.log_history if name in each}
    assert set(told) == {1, 2}
    assert told == history
    with pytest.raises(InputError, match="trainer"):
        normattn.hf.AttentionCallback(trainer=3)


@pytest.mark.parametrize("method", ["ReRoPE", "DynamicNTK", "YaRN-logn+"])
def test_an_extended_model_is_trained_by_the_trainer(tmp_path: Path, method: str) -> None:
    model = build("Llama")
    before = model.lm_head.weight.clone()
    callback = normattn.hf.AttentionCallback(every=1)
    with normattn.extend(model, method, **ATTENTION[method]):
        trainer = _trainer(tmp_path, model, callback, bf16=True, gradient_checkpointing=True)
        trainer.train()
    assert not torch.equal(model.lm_head.weight, before)
    assert "attention_largest/model.layers.1.self_attn" in trainer.state.log_history[0]


def test_readme_s_name_needs_no_import_of_its_own() -> None:
    done = apart.run("import normattn; print(normattn.hf.AttentionCallback.__name__)")
    assert done.out.strip() == "AttentionCallback", done.err


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

held = []
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
    assert json.loads(done.out) == []


@pytest.mark.parametrize("method", ["ReRoPE", "logn+"])
def test_arguments_that_would_be_ignored_are_refused(method: str) -> None:
    model, ids = model_of("Llama"), tokens(1)
    ends = torch.tensor([0, 10, ids.shape[1]], dtype=torch.int32)
    with normattn.extend(model, method, **ATTENTION[method]):
        plain = logits(model, ids)
        for name, value in (
            ("cu_seq_lens_q", ends),
            ("max_length_k", 14),
            ("s_aux_scale", 2.0),
            ("position_bias", torch.zeros(1)),
        ):
            with pytest.raises(InputError, match=name):
                logits(model, ids, **{name: value})
        # What a Trainer adds reaches attention too, and asks nothing of it.
        assert torch.equal(logits(model, ids, num_items_in_batch=3), plain)


def _packed(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


@pytest.mark.parametrize("method", ["ReRoPE", "SelfExtend", "logn+", "YaRN"])
def test_documents_packed_by_their_position_ids(method: str) -> None:
    model, ids = model_of("Llama"), tokens(1)
    lengths = (10, ids.shape[1] - 10)
    with normattn.extend(model, method, **ATTENTION.get(method, {"factor": 3})):
        packed = logits(model, ids, position_ids=_packed(lengths), use_cache=False)
        alone = [logits(model, part) for part in torch.split(ids, list(lengths), 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)
    assert max(lengths) > LENGTH


def test_a_family_s_own_tiny_model_is_observed_in_half_precision() -> None:
    from normattn.hf.observe import collect_statistics

    model, ids = tiny.build("llama"), tokens()
    with collect_statistics(model) as exact:
        logits(model, ids)
    with collect_statistics(model) as rounded, torch.autocast("cpu", torch.bfloat16):
        logits(model, ids)
    for name, line in exact.lines().items():
        assert rounded.lines()[name]["entropy"] == pytest.approx(line["entropy"], rel=0.05)


RECOMPUTED = ["granitemoehybrid", "cohere_compass_text", "zaya", "qwen4_exp_text", "gemma3_text"]


@pytest.mark.parametrize("family", RECOMPUTED)
@pytest.mark.parametrize("method", ["YaRN", "ReRoPE"])
def test_recomputed_activations_give_the_same_gradients(family: str, method: str) -> None:
    model, ids = tiny.build(family).train(), tokens(1, 12)
    values = {"YaRN": {"factor": 4}, "ReRoPE": {"window": 4}}[method]
    found = []
    with normattn.extend(model, method, **values):
        for recompute in (False, True):
            if recompute:
                newer = getattr(model, "activation_checkpointing_enable", None)
                (newer or model.gradient_checkpointing_enable)()
            model.zero_grad()
            torch.manual_seed(0)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            grads = (each.grad for each in model.parameters())
            found.append([grad.clone() for grad in grads if grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["YaRN", "ReRoPE", "DynamicNTK"])
def test_layers_get_a_row_of_cos_and_sin_for_every_token(method: str) -> None:
    """A fused kernel reads one row a token, side by side in memory (Liger's does)."""
    model, ids = build("Llama"), tokens()
    seen: list[Tensor] = []

    def keep(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.extend(kwargs["position_embeddings"])

    hook = model.model.layers[0].self_attn.register_forward_pre_hook(keep, with_kwargs=True)
    with normattn.extend(model, method, **ATTENTION.get(method, {"factor": 3})):
        seen.clear()
        logits(model, ids)
    hook.remove()
    assert len(seen) == 2
    for table in seen:
        assert table.shape[1:] == (ids.shape[1], model.config.head_dim)
        assert table.is_contiguous()


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


@pytest.mark.parametrize("method", ["YaRN", "PI"])
def test_frequencies_are_kept_in_float32_when_the_model_is_cast(method: str) -> None:
    model, ids = build("Llama"), tokens()
    own = model.model.rotary_emb.inv_freq.clone()
    as_trained = logits(model, ids)
    with normattn.extend(model, method, factor=3):
        extended = logits(model, ids)
        stretched = model.model.rotary_emb.inv_freq.clone()
        model.to(torch.bfloat16)
        assert torch.equal(model.model.rotary_emb.inv_freq, stretched)
        rounded = logits(model, ids).float()
        model.float()
    assert float((rounded - extended).norm() / extended.norm()) < 3e-2
    assert torch.equal(model.model.rotary_emb.inv_freq, own)
    again = build("Llama").to(torch.bfloat16).float()
    again.model.rotary_emb.inv_freq.copy_(own)
    assert torch.equal(logits(model, ids), logits(again, ids))
    assert not torch.equal(logits(model, ids), as_trained)


def test_an_extension_reads_the_model_twice() -> None:
    """From a disk, where the weights do not fit into memory, each forward is a pass over it."""
    model, runs = build("Llama"), []
    model.lm_head.register_forward_hook(lambda *_: runs.append(1))
    for method, values in {**ATTENTION, "PI": {"factor": 2}}.items():
        runs.clear()
        normattn.extend(model, method, **values).remove()
        assert len(runs) == 2, method


COMPILED = """
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
model, other = (LlamaForCausalLM(config).eval() for _ in range(2))
ids = torch.randint(0, 32, (1, 24))
traced = []

def counting(graph, inputs):
    traced.append(1)
    return graph

@torch.no_grad()
def logits(run, **more):
    return run(input_ids=ids, use_cache=False, **more).logits

compiled, unrelated = (torch.compile(each, backend=counting) for each in (model, other))
logits(unrelated)
found = {}
for method, values in json.load(sys.stdin):
    with normattn.extend(compiled, method, **values):
        extended = logits(model)
        found[f"{method} {values}"] = (logits(compiled) - extended).abs().max().item()
traced.clear()
logits(unrelated)
found["an unrelated model"] = len(traced)
json.dump(found, sys.stdout)
"""


def test_a_compiled_model_is_extended_by_every_method() -> None:
    """In a process of its own: the run-time type checks of the tests cannot be traced."""
    methods = [*ATTENTION.items(), ("ReRoPE", {"window": 9}), ("YaRN", {"factor": 2})]
    done = apart.run(COMPILED, told=json.dumps(methods))
    assert done.code == 0, done.err[-2000:]
    found: dict[str, float] = json.loads(done.out)
    assert found.pop("an unrelated model") == 0
    assert len(found) == len(methods)
    assert max(found.values()) < 1e-5, found


def test_the_score_of_an_extended_model_is_not_read() -> None:
    model = model_of("Llama")
    with normattn.extend(model, "ReRoPE", window=3), pytest.raises(InputError, match="remove"):
        normattn.score_of(model)
    assert normattn.score_of(model).verified
