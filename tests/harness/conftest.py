"""A trained run and a Llama with its tokeniser, which lm-evaluation-harness asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from normattn.cli.app import main

PRESET = """
summary = "for tests"
[training]
steps = 3
batch_size = 4
[training.model]
dim = 16
layers = 1
heads = 2
train_length = 8
[training.data]
corpus = "{corpus}"
vocab_size = 280
test_fraction = 0.4
[training.schedule]
warmup_steps = 1
[evaluation]
multiples = [1]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that learned nothing."""
    folder = tmp_path_factory.mktemp("harness")
    texts = folder / "texts"
    texts.mkdir()
    for n in range(8):
        words = "\n".join(f"word{(n * 7 + i * i) % 50}" for i in range(150))
        (texts / f"text{n:02}.txt").write_text(words)
    (folder / "tiny.toml").write_text(PRESET.format(corpus=texts))
    out = folder / "run"
    with pytest.raises(SystemExit) as ended:
        main(["train", "--preset", str(folder / "tiny.toml"), "--score", "KNA", "--out", str(out)])
    assert ended.value.code == 0
    return out


@pytest.fixture(scope="module")
def llama(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the run's tokeniser."""
    import transformers

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        vocab_size=280,
        num_attention_heads=2,
        max_position_embeddings=8,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=0,
        **sizes,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    file = str(run / "tokeniser.json")
    made: Any = transformers.PreTrainedTokenizerFast
    made(tokenizer_file=file, eos_token="<|doc|>").save_pretrained(folder)
    return folder


@pytest.fixture(params=["run", "pretrained"])
def named(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The model arguments of each kind of model."""
    folder = request.getfixturevalue("run" if request.param == "run" else "llama")
    return {request.param: str(folder)}
