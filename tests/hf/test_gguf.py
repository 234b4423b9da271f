"""A GGUF file: its weights as transformers computes with them, extended, saved and loaded again."""

from __future__ import annotations

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

from .families import logits, tokens

gguf = pytest.importorskip("gguf")

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
SIZES["rms_norm_eps"] = 1e-5
_LAYER = {f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"}
_LAYER |= {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_LAYER |= {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm"}
_LAYER["ffn_norm"] = "post_attention_layernorm"
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PAIRS = {"attn_q": 4, "attn_k": 2}


def _turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """Halves of a head's features side by side, as the format has them."""
    apart = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(apart.swapaxes(1, 2)).reshape(weight.shape)


def write(path: Path, letters: list[str], factors: list[float] | None = None) -> Any:
    """A GGUF of random weights in blocks of 8 bits; the model that has the same numbers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(letters), tie_word_embeddings=False, initializer_range=0.2, **SIZES
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.eval()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(SIZES["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(letters))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(letters)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    names = {**_WHOLE}
    for layer in range(SIZES["num_hidden_layers"]):
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
    letters = [*map(chr, range(33, 97)), '!"']
    expected = write(tmp_path / "tiny.gguf", letters)
    model, tokeniser = load(tmp_path / "tiny.gguf")
    ids = tokens(length=40)
    torch.testing.assert_close(logits(model, ids), logits(expected, ids), rtol=1e-4, atol=1e-5)
    assert tokeniser('!"#')["input_ids"] == [64, 2]
    half, _ = load(tmp_path / "tiny.gguf", dtype=torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    with normattn.extend(model, "ReRoPE", window=4):
        wanted = logits(model, ids)
        model.save_pretrained(tmp_path / "saved")
    again = normattn.from_pretrained(str(tmp_path / "saved"))
    torch.testing.assert_close(logits(again, ids), wanted)


SCALED: list[dict[str, tuple[str, Any]]] = [
    {"scaling.type": ("str", "yarn"), "scaling.factor": ("f32", 4.0)},
    {"scaling.factor": ("f32", 4.0)},
    {"scale_linear": ("f32", 4.0)},
]


def test_scaled_frequencies_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers would read them as plain ones."""
    letters = [*map(chr, range(33, 97)), '!"']
    write(tmp_path / "plain.gguf", letters)
    cases = []
    for number, keys in enumerate(SCALED):
        cases.append((tmp_path / f"keys{number}.gguf", "holds a (yarn|linear) scaling"))
        changed = {f"llama.rope.{name}": value for name, value in keys.items()}
        write_gguf(tmp_path / "plain.gguf", cases[-1][0], changed)
    cases.append((tmp_path / "tensor.gguf", "holds rope_freqs.weight, which scales"))
    write(cases[-1][0], letters, factors=[1, 1, 2, 4, 8, 8, 8, 8])
    for file, why in cases:
        for read in (load, read_configuration):
            with pytest.raises(InputError, match=why):
                read(file)
        with monkeypatch.context() as patch:
            patch.setattr(transformers.utils.hub, "cached_file", lambda *_, at=str(file), **__: at)
            with pytest.raises(InputError, match=why):
                load("owner/name", file.name)
    plain = {"llama.rope.scaling.type": ("str", "none")}
    write_gguf(tmp_path / "plain.gguf", tmp_path / "none.gguf", plain)
    assert load(tmp_path / "none.gguf")[0].config.rope_parameters["rope_type"] == "default"
