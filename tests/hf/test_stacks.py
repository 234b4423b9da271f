"""Extended and observed models on the stacks that people use: autocast, Trainer, compilers, …"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama import modeling_llama

import apart
import normattn
from normattn import InputError
from normattn.lab.diagnostics.lines import read_diagnostics
from thorough import half_of

from . import matrix, tiny
from .families import LENGTH, build, logits, model_of, tokens
from .matrix import stepwise

FREQUENCIES = ("PI", "NTK", "NTK-mixed", "ABF", "YaRN")
METHODS = {**matrix.METHODS, "DualChunk": {}, "YaRN-logn+": {"factor": 4}}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
BOTH = ["YaRN", "ReRoPE"]  # one changes frequencies, the other attention


@pytest.mark.parametrize("method", ["ReRoPE", "DynamicNTK", "DualChunk", "YaRN-logn+", "YaRN"])
def test_autocast_gives_what_float32_gives_rounded(method: str) -> None:
    model, ids = model_of("Qwen3"), tokens()
    with normattn.extend(model, method, **METHODS[method]):
        exact = logits(model, ids)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = logits(model, ids)
            decoded = stepwise(model, ids, (ids.shape[1] - 1, 1))
    off, off_decoded = (
        (found.float() - exact).norm(dim=-1) / exact.norm(dim=-1) for found in (rounded, decoded)
    )
    assert float(off.median()) < 3e-2
    assert float(off_decoded[0, -1]) < 5e-2


def _trainer(folder: Path, model: Any, *callbacks: Any, **more: Any) -> Any:
    pytest.importorskip("accelerate")
    more |= {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    more |= {"max_steps": 2, "per_device_train_batch_size": 2}
    arguments = transformers.TrainingArguments(output_dir=str(folder), **more)
    rows = [{"input_ids": row, "labels": row} for row in tokens(rows=4)]
    return transformers.Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks))


@pytest.mark.parametrize("bf16", [False, True])
def test_the_trainer_logs_the_largest_logit_of_an_undisturbed_training(
    tmp_path: Path, bf16: bool
) -> None:
    logged, weights = Mock(wraps=transformers.TrainerCallback()), []
    for observed in (False, True):
        trainer = _trainer(tmp_path, build("Llama"), logged, bf16=bf16)
        if observed:
            trainer.add_callback(normattn.hf.AttentionCallback(every=1, trainer=trainer))
        trainer.train()
        weights.append([weight.clone() for weight in trainer.model.parameters()])
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    lines, name = read_diagnostics(tmp_path), "model.layers.0.self_attn"
    assert [line.step for line in lines] == [1, 2]
    largest = [max(x for x in line.layers[name].largest if x is not None) for line in lines]
    logs = [call.kwargs["logs"] for call in logged.on_log.call_args_list]
    for told in (logs, trainer.state.log_history):
        key = f"attention_largest/{name}"
        assert [each[key] for each in told if key in each] == largest


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
    callback = normattn.hf.AttentionCallback()
    callback.on_train_begin(arguments, None, None)
    arguments.report_to = ["tensorboard"]
    with pytest.raises(InputError, match="tensorboard"):
        callback.on_train_begin(arguments, None, None)
    for wrong in ({"every": 0}, {"every": True}, {"trainer": 3}):
        with pytest.raises(InputError, match=r"every|trainer"):
            normattn.hf.AttentionCallback(**wrong)


HELD = """
import gc, json, sys, weakref
import torch, normattn
from hf.tiny import build
from normattn.hf.observe import collect_statistics

def extended(model):
    with normattn.extend(model, "ReRoPE-logn+", window=4):
        model(torch.arange(12)[None])

def observed(model):
    with collect_statistics(model):
        model(torch.arange(12)[None])

held = [normattn.hf.AttentionCallback.__name__]  # as README names it, without another import
for use in (normattn.score_of, extended, observed):
    model = build("llama")
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
    ends = torch.tensor([0, 10, ids.shape[1]])
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
        packed = logits(model, ids, position_ids=places)
        alone = [logits(model, part) for part in torch.split(ids, lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


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
        extended, scaled = logits(model, ids), rotary.inv_freq.clone()
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
import normattn
from hf.tiny import build
from transformers import StaticCache
warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
torch._dynamo.config.recompile_limit = 256  # beyond its limit a model is run as it is
model = build("llama", num_hidden_layers=1, max_position_embeddings=8)
other = torch.nn.Linear(2, 2)
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
    cache = StaticCache(model.config, max_cache_len=16)
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
    attention = {name: values for name, values in METHODS.items() if name not in FREQUENCIES}
    every = [*attention.items(), ("ReRoPE", {"window": 7}), ("YaRN", {"factor": 2})]
    # Each way of changing a model, and one way with two settings.
    chosen = ("ReRoPE", "DynamicNTK", "YaRN")
    methods = [each for each in every if thorough or each[0] in chosen]
    factors = (2, 4) if thorough else (2,)
    done = apart.run(COMPILED, told=json.dumps([methods, factors, FREQUENCIES]))
    assert done.code == 0, done.err[-2000:]
    found: dict[str, float] = json.loads(done.out)
    asked = {f"{name} is compiled" for name, _ in methods}
    asked |= {f"{name} is decoded" for name, _ in methods if name in attention}
    assert asked <= set(found)
    assert max(found.values()) < 1e-4, found


def test_continuous_batching_is_refused_by_transformers() -> None:
    """Pages of keys are no cache that a method for attention can read."""
    model, why = build("Llama"), "not supported for continuous batching"
    with normattn.extend(model, "ReRoPE", window=3), pytest.raises(ValueError, match=why):
        model.generate_batch([[3, 4]])


@pytest.mark.parametrize("method", BOTH)
def test_weights_that_lie_on_a_disk(method: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, whole, ids = build("Llama"), build("Llama"), tokens()
    accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    given = {"method": method, **METHODS[method]}
    with normattn.extend(model, **given), normattn.extend(whole, **given):
        assert torch.equal(logits(model, ids), logits(whole, ids))
    assert torch.equal(logits(model, ids), logits(whole, ids))
    with torch.device("meta"):
        empty = type(whole)(whole.config)
    with pytest.raises(InputError, match="on the meta device"):
        normattn.extend(empty, **given)


ROTATION = modeling_llama.apply_rotary_pos_emb


def _fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Any:
    """The rotation as Liger's kernel reads its tables: one contiguous row for each token."""
    assert cos.shape[1] == q.shape[2]
    assert cos.is_contiguous()
    rows = torch.arange(q.shape[2]) * cos.stride(1)
    places = rows[:, None] + torch.arange(cos.shape[-1])
    return ROTATION(q, k, *(table.flatten(1)[:, places] for table in (cos, sin)))


@pytest.mark.parametrize("method", ["YaRN", "ReRoPE", "DynamicNTK"])
def test_a_fused_rotation_as_liger_s(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build("Llama"), tokens()
    with normattn.extend(model, method, **METHODS[method]):
        plain = logits(model, ids)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", _fused)
    with normattn.extend(model, method, **METHODS[method]):
        torch.testing.assert_close(logits(model, ids), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "method"), half_of(("qwen2_5_vl", "qwen3_vl"), (*BOTH, "DynamicNTK"))
)
def test_the_text_decoder_of_a_vision_language_model(kind: str, method: str) -> None:
    """Positions of an image are scaled, or refused where tokens are counted."""
    config = tiny.configuration(kind, text_config={"rope_parameters": SECTIONS})
    model, ids = tiny.build_of(config, transformers.AutoModelForImageTextToText), tokens()
    places = torch.arange(ids.shape[1]).expand(3, *ids.shape).clone()
    places[1:, :, 3:6] = 3
    as_trained, with_image = logits(model, ids), logits(model, ids, position_ids=places)
    with normattn.extend(model, method, **METHODS[method]):
        extended = logits(model, ids)
        decoded = stepwise(model, ids, (ids.shape[1] - 1, 1))
        if method == "YaRN":
            scaled = logits(model, ids, position_ids=places)
            assert float((scaled - with_image).abs().max()) > 1e-3
        else:
            with pytest.raises(InputError, match="takes only text"):
                logits(model, ids, position_ids=places)
    assert float((extended - as_trained).abs().max()) > 1e-3
    torch.testing.assert_close(decoded, extended, rtol=1e-3, atol=1e-3)
    assert torch.equal(logits(model, ids), as_trained)


def test_the_score_of_an_extended_model_is_not_read() -> None:
    model = model_of("Llama")
    with normattn.extend(model, "ReRoPE", window=3), pytest.raises(InputError, match="remove"):
        normattn.score_of(model)
    assert normattn.score_of(model).verified
    for count in (1, True, 2.5):
        with pytest.raises(InputError, match="tokens must be a whole number of at least 2"):
            normattn.score_of(model, tokens=count)  # type: ignore[arg-type]


# Adapters of PEFT: trained, saved and loaded with their method, or refused.


def _adapted(base: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    how = {"r": 2, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], **how)
    return peft.get_peft_model(base, config).eval()


@pytest.mark.parametrize("method", ["YaRN", "YaRN-logn+", "DynamicNTK"])
def test_an_adapter_is_saved_with_its_method_and_comes_back(method: str, tmp_path: Path) -> None:
    build("Llama").save_pretrained(tmp_path / "base")
    model, ids = _adapted(tiny.AUTO.from_pretrained(tmp_path / "base")), tokens()
    as_trained = logits(model, ids)
    with normattn.extend(model, method, **METHODS[method]) as extension:
        extended = logits(model, ids)
        assert not torch.equal(extended, as_trained)
        model.save_pretrained(tmp_path / "adapter")
        assert torch.equal(logits(model, ids), extended)
    assert torch.equal(logits(model, ids), as_trained)
    record = json.loads((tmp_path / "adapter" / "normattn.json").read_text())
    assert record == {"method": extension.spec.method_text, "train_length": LENGTH}
    again = normattn.from_pretrained(str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(again, ids), extended)
    normattn.hf.extension_of(again).remove()  # type: ignore[union-attr]
    torch.testing.assert_close(logits(again, ids), as_trained)
    model.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "normattn.json").exists()
    with pytest.raises(InputError, match=r"normattn\.json"):
        normattn.from_pretrained(str(tmp_path / "plain"))


def test_every_adapter_that_is_saved_has_the_method(tmp_path: Path) -> None:
    build("Llama").save_pretrained(tmp_path / "base")
    model = _adapted(tiny.AUTO.from_pretrained(tmp_path / "base"))
    model.add_adapter("second", model.peft_config["default"])
    model.set_adapter("second")
    with normattn.extend(model, "ReRoPE", window=3):
        extended = logits(model, tokens())
        model.save_pretrained(tmp_path / "both")
        model.save_pretrained(tmp_path / "one", selected_adapters=["second"])
    for folder in ("both", "one"):
        again = normattn.from_pretrained(str(tmp_path / folder / "second"))
        torch.testing.assert_close(logits(again, tokens()), extended)
    assert (tmp_path / "both" / "normattn.json").exists()
    assert not (tmp_path / "one" / "normattn.json").exists()
    file = tmp_path / "both" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "task_type": "SEQ_CLS"}))
    with pytest.raises(InputError, match=r"adapter for SEQ_CLS.*ReRoPE\(window=3\)"):
        normattn.from_pretrained(str(tmp_path / "both"))


def test_an_adapter_is_trained_under_a_method() -> None:
    model, ids = _adapted(build("Llama")).train(), tokens()
    with normattn.extend(model, "ReRoPE", window=3):
        model(input_ids=ids, labels=ids).loss.backward()
    grads = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    assert grads
    assert all("lora_" in name and grad is not None for name, grad in grads.items())


def test_an_adapter_on_an_extended_model_is_not_saved_without_the_method(tmp_path: Path) -> None:
    base = build("Llama")
    with normattn.extend(base, "YaRN", factor=4):
        model = _adapted(base)
        logits(model, tokens())
        with pytest.raises(InputError, match="without the method YaRN"):
            model.save_pretrained(tmp_path)
        assert not (tmp_path / "adapter_model.safetensors").exists()
    model.save_pretrained(tmp_path)
    with normattn.extend(base, "YaRN", factor=4), pytest.raises(InputError, match="YaRN"):
        model.save_pretrained(tmp_path)
