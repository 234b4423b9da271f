"""An adapter of an extended model is trained, saved and loaded with its method, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import normattn
from normattn import InputError
from normattn.hf import extension_of

from .families import build, logits, tokens

peft: Any = pytest.importorskip("peft")

METHODS: dict[str, dict[str, Any]] = {
    "YaRN": {"factor": 4},
    "ReRoPE-logn+": {"window": 3},
    "DynamicNTK": {},
}


def _adapted(base: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.2, generator=generator)
    return model.eval()


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_is_saved_with_its_method_and_comes_back(method: str, tmp_path: Path) -> None:
    build("Llama").save_pretrained(tmp_path / "base")
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.eval()
    model, ids = _adapted(base), tokens()
    as_trained = logits(model, ids)
    with normattn.extend(model, method, **METHODS[method]) as extension:
        extended = logits(model, ids)
        assert not torch.equal(extended, as_trained)
        model.save_pretrained(tmp_path / "adapter")
        assert torch.equal(logits(model, ids), extended)
    assert torch.equal(logits(model, ids), as_trained)
    record = json.loads((tmp_path / "adapter" / "normattn.json").read_text())
    assert record == {"method": extension.spec.method_text, "train_length": 8}
    again = normattn.from_pretrained(str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(again, ids), extended)
    found = extension_of(again)
    assert found is not None
    found.remove()
    torch.testing.assert_close(logits(again, ids), as_trained)
    model.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "normattn.json").exists()
    with pytest.raises(InputError, match=r"normattn\.json"):
        normattn.from_pretrained(str(tmp_path / "plain"))


def test_every_adapter_that_is_saved_has_the_method(tmp_path: Path) -> None:
    build("Llama").save_pretrained(tmp_path / "base")
    model = _adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    config = peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False)
    model.add_adapter("second", config)
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
    with normattn.extend(model, "ReRoPE-logn+", window=3):
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
