"""A project that uses the typed interface.

mypy checks it here against the source, and in `scripts/package` against the installed package.
Each line that is marked must be an error, or mypy says that the mark is unused.
"""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor

import normattn
from normattn import CausalLM, CausalLMConfig, Explanation, InputError, NormattnError, ScoreSpec


def read_far(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A score by its name, as a value, and as a module with what it learns."""
    spec = ScoreSpec.parse("KNA-logn-ReRoPE(window=128)@512")
    assert_type(spec, ScoreSpec)
    assert_type(spec.name, str)
    assert_type(normattn.attention(q, k, v, spec), Tensor)
    assert_type(normattn.attention(q, k, v, normattn.Score(spec, heads=4, head_dim=64)), Tensor)
    return normattn.attention(q, k, v, "KNA-logn@512", causal=True)


def layers() -> list[torch.nn.Module]:
    """Modules for a model of one's own."""
    return [
        normattn.Attention(64, 4, kv_heads=2, score="QKRMSNorm"),
        normattn.GatedAttentionUnit(64, score=ScoreSpec.parse("CosA@512")),
    ]


def explained(name: str) -> str:
    """The kernel that serves a score, or why none does."""
    try:
        found = normattn.explain(name, (1, 4, 2048, 64))
    except InputError as error:
        assert_type(error, InputError)
        return str(error)
    except NormattnError as error:
        return str(error)
    assert_type(found, Explanation)
    return found.kernel


def written(prompt: list[int]) -> list[int]:
    """A language model, and what it says next."""
    settings: dict[str, int] = {"vocab_size": 64, "dim": 32, "layers": 1, "train_length": 16}
    model = CausalLM(CausalLMConfig.model_validate(settings))
    assert_type(model.config, CausalLMConfig)
    (answer,) = normattn.generate(model, [prompt], 8)
    return list(answer.tokens)


def wrong(q: Tensor) -> None:
    """What a type checker must not let pass."""
    normattn.attention(q, q, q, 512)  # type: ignore[call-overload]
    normattn.attention(q, q, q, "KNA@512", window=4)  # type: ignore[call-overload]
    normattn.explain("KNA@512", 64)  # type: ignore[arg-type]
    normattn.Attention("64", 4)  # type: ignore[arg-type]
    print(normattn.no_such_name)  # type: ignore[attr-defined]
