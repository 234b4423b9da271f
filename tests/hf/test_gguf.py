"""Loading: a GGUF file, its weights as transformers computes with them; what cannot be loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import normattn
from normattn import InputError
from normattn.hf import load
from normattn.hf.llama_cpp import write_gguf
from normattn.hf.load import read_configuration

from . import tiny
from .families import logits, tokens

gguf = pytest.importorskip("gguf")

SIZES: dict[str, Any] = {"vocab_size": 65, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
_LAYER = {f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"}
_LAYER |= {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_LAYER |= {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"}
_LAYER["ffn_norm"] = "post_attention_layernorm"
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LETTERS = [*map(chr, range(33, 97)), '!"']
_WORDS = {"context_length": "max_position_embeddings", "embedding_length": "hidden_size"}
_WORDS |= {"block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size"}
_WORDS |= {"head_count": "num_attention_heads", "head_count_kv": "num_key_value_heads"}
_WORDS |= {"layer_norm_rms_eps": "rms_norm_eps"}
_PAIRS = {"attn_q": 4, "attn_k": 2}


def _turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """Halves of a head's features side by side, as the format has them."""
    apart = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(apart.swapaxes(1, 2)).reshape(weight.shape)


def write(path: Path, letters: list[str] = LETTERS, factors: Sequence[float] | None = None) -> Any:
    """A GGUF of random weights in blocks of 8 bits; the model that has the same numbers."""
    model = tiny.build("llama", **SIZES | {"vocab_size": len(letters)})
    writer = gguf.GGUFWriter(path, "llama")
    for word, name in _WORDS.items():
        getattr(writer, f"add_{word}")(getattr(model.config, name))
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(letters))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(letters)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    names = {**_WHOLE}
    for layer in range(model.config.num_hidden_layers):
        names |= {f"blk.{layer}.{a}": f"model.layers.{layer}.{b}" for a, b in _LAYER.items()}
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, theirs in names.items():
        weight = model.get_parameter(f"{theirs}.weight")
        if weight.dim() == 1:
            writer.add_tensor(f"{name}.weight", weight.detach().numpy())
            continue
        packed = gguf.quants.quantize(weight.detach().numpy(), kind)
        with torch.no_grad():
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind)))
        heads = _PAIRS.get(name.split(".")[-1])
        kept = weight.detach().numpy()
        packed = gguf.quants.quantize(kept if heads is None else _turned(kept, heads), kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_gguf_is_read_extended_and_saved(tmp_path: Path) -> None:
    expected, ids = write(tmp_path / "tiny.gguf"), tokens(length=40)
    model, tokeniser = load(tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits(model, ids), logits(expected, ids), rtol=1e-4, atol=1e-5)
    assert tokeniser('!"#')["input_ids"] == [64, 2]
    half, _ = load(tmp_path / "tiny.gguf", dtype=torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    with normattn.extend(model, "ReRoPE", window=4):
        wanted = logits(model, ids)
        model.save_pretrained(tmp_path / "saved")
    again = normattn.from_pretrained(str(tmp_path / "saved"))
    torch.testing.assert_close(logits(again, ids), wanted)


SCALED: dict[str, dict[str, tuple[str, Any]]] = {
    "yarn": {"scaling.type": ("str", "yarn"), "scaling.factor": ("f32", 4.0)},
    "linear": {"scaling.factor": ("f32", 4.0)},
    "old": {"scale_linear": ("f32", 4.0)},
    "none": {"scaling.type": ("str", "none")},
}


def test_scaled_frequencies_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers would read them as plain ones."""
    write(tmp_path / "plain.gguf")
    write(tmp_path / "tensor.gguf", factors=[1, 1, 2, 4, 8, 8, 8, 8])
    for name, keys in SCALED.items():
        changed = {f"llama.rope.{key}": value for key, value in keys.items()}
        write_gguf(tmp_path / "plain.gguf", tmp_path / f"{name}.gguf", changed)
    for name, why in (
        *((name, "holds a (yarn|linear) scaling") for name in ("yarn", "linear", "old")),
        ("tensor", "holds rope_freqs.weight, which scales"),
    ):
        file = tmp_path / f"{name}.gguf"
        for read in (load, read_configuration):
            with pytest.raises(InputError, match=why):
                read(file)
        with monkeypatch.context() as patch:
            patch.setattr(transformers.utils.hub, "cached_file", lambda *_, at=str(file), **__: at)
            with pytest.raises(InputError, match=why):
                load("owner/name", file.name)
    assert load(tmp_path / "none.gguf")[0].config.rope_parameters["rope_type"] == "default"


def test_the_tokeniser_is_of_the_models_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    module = sys.modules[load.__module__]  # normattn.hf.load is the function
    monkeypatch.setattr(module, "load_unmodified", lambda *_, **__: (None, None))
    monkeypatch.setattr(module, "_loading_options", lambda *_: {})
    auto = transformers.AutoTokenizer
    monkeypatch.setattr(auto, "from_pretrained", lambda source, **options: options)
    _, options = load(tmp_path, revision="old", token="secret", device_map="auto")
    assert (options["revision"], options["token"]) == ("old", "secret")
    assert "device_map" not in options
    assert load("owner/name", subfolder="sub")[1] == {"subfolder": "sub"}


def test_a_subfolder_holds_weights_and_tokeniser(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    letters = [*map(chr, range(33, 97)), '!"']
    model = write(tmp_path / "sub" / "tiny.gguf", letters)
    loaded, tokeniser = load(tmp_path, "tiny.gguf", subfolder="sub")
    assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    assert set(letters) <= tokeniser.get_vocab().keys()
    with normattn.extend(loaded, "ReRoPE", window=8):
        loaded.save_pretrained(tmp_path / "sub")
    again = normattn.from_pretrained(str(tmp_path), subfolder="sub")
    extension = normattn.hf.extension_of(again)
    assert extension is not None
    assert extension.resolved.method == "ReRoPE(window=8)"
    with pytest.raises(InputError, match="does not exist"):
        load(tmp_path, subfolder="gone")


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    packed, empty = tmp_path / "model.gguf", tmp_path / "empty"
    empty.mkdir()
    packed.write_bytes(b"PK\x03\x04")
    for place, file, config, why in (
        (empty, None, None, "of transformers, and no GGUF file either"),
        (packed, None, None, "is not a GGUF file"),
        (tmp_path, "other.gguf", None, "there is no file"),
        (packed, "other.gguf", None, "has no meaning"),
        (tmp_path, None, "{}", "Unrecognized model"),
        (tmp_path, None, '{"model_type": "llama"}', "safetensors"),
    ):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        with pytest.raises(InputError, match=why):
            load(place, gguf=file)
