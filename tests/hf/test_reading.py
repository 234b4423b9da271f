"""Loading a model, and scoring its tokens a few rows at a time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

import normattn
from normattn import InputError
from normattn.hf import load, token_scorer

from .families import logits, model_of, tokens
from .test_gguf import write


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Granite", "Cohere"])
def test_scores_are_those_of_the_logits(family: str) -> None:
    model, ids = model_of(family), tokens()
    score = token_scorer(model)
    for method in (None, "ReRoPE-logn+(window=3)"):
        extension = normattn.extend(model, "ReRoPE-logn+", window=3) if method else None
        whole, found = logits(model, ids[:, :-1]), score(ids)
        if extension is not None:
            extension.remove()
        expected = torch.nn.functional.cross_entropy(
            whole.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        torch.testing.assert_close(found.loss.flatten(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found.correct, whole.argmax(-1) == ids[:, 1:])


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
    assert normattn.hf.extension_of(again).resolved.method == "ReRoPE(window=8)"
    with pytest.raises(InputError, match="does not exist"):
        load(tmp_path, subfolder="gone")


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="of transformers, and no GGUF file either"):
        load(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(InputError, match="is not a GGUF file"):
        load(tmp_path / "model.gguf")
    with pytest.raises(InputError, match="there is no file"):
        load(tmp_path, gguf="other.gguf")
    with pytest.raises(InputError, match="has no meaning"):
        load(tmp_path / "model.gguf", gguf="other.gguf")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="Unrecognized model"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="safetensors"):
        load(tmp_path)
