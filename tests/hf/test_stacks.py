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
