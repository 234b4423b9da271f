"""A trained run and a Llama with its tokeniser, which lm-evaluation-harness asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.conftest import command, corpus, tiny, trained
from normattn.models import load_model

__all__ = ["command", "corpus", "tiny", "trained"]


@pytest.fixture(scope="session")
def run(trained: Path) -> Path:
    """A finished run that learned nothing."""
    return trained


@pytest.fixture(scope="session")
def llama(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the run's tokeniser."""
    import transformers

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "max_position_embeddings": 8}
    ends: dict[str, Any] = {"initializer_range": 0.5, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.LlamaConfig(vocab_size=260, **sizes, **heads, **ends)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    made: Any = transformers.PreTrainedTokenizerFast
    file = str(run / "tokeniser.json")
    made(tokenizer_file=file, eos_token="<|doc|>").save_pretrained(folder)
    return folder


@pytest.fixture(params=["run", "pretrained"])
def named(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The model arguments of each kind of model."""
    folder = request.getfixturevalue("run" if request.param == "run" else "llama")
    return {request.param: str(folder)}


def logits_of(arguments: dict[str, Any]) -> Callable[[Any], Any]:
    """The bare model that the arguments name, in float64 unless they say otherwise."""
    dtype = getattr(torch, arguments.get("dtype", "float64"))
    if "run" in arguments:
        return load_model(Path(arguments["run"]) / "model").to(dtype).eval()
    from transformers import LlamaForCausalLM

    found: Any = LlamaForCausalLM.from_pretrained(arguments["pretrained"], dtype=dtype)
    return lambda ids: found(ids).logits


def by_hand(logits: Any, tokens: list[int], scored: int) -> tuple[float, bool]:
    """Log-likelihood of the last `scored` tokens, and whether each is the likeliest."""
    with torch.no_grad():
        known = logits(torch.tensor([tokens]))[0, :-1].double().log_softmax(-1)[-scored:]
    goal = torch.tensor(tokens[-scored:])
    return float(known[range(scored), goal].sum()), bool((known.argmax(-1) == goal).all())
