"""The two kinds of model that lm-evaluation-harness can be given, behind one interface.

A run trained here, and a model of transformers with or without an extension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from normattn.errors import InputError
from normattn.kernels import TokenScores
from normattn.lab.data.tokeniser import SEPARATOR_ID, Tokeniser
from normattn.lab.evaluation.scorer import TokenScorer, from_causal_lm
from normattn.models import CausalLM, Sampling, generate
from normattn.models.generation import left_padded
from normattn.score import ScoreSpec

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Drawing:
    """How an answer is made: up to `most` tokens or a text of `until`, greedy at temperature 0."""

    most: int
    until: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


class HarnessModel(ABC):
    """A causal language model with its tokeniser.

    Attributes:
        train_length: how far it was trained to read.
        prefix: the token before a text that has no context.
        end: the token that ends a text, or None.
        described: what is on, for the log.
        chat: the tokeniser of transformers that may hold a chat template, or None.
        alone: whether a row must be read by itself, for others of its batch would change it.
    """

    train_length: int
    prefix: int
    end: int | None
    described: str
    chat: Any = None
    alone: bool = False
    scorer: TokenScorer

    @abstractmethod
    def encode(self, text: str, special: bool | None) -> list[int]:
        """The tokens of a text; `special` tokens as the tokeniser has it where None."""

    @abstractmethod
    def answers(self, prompts: Prompts, drawing: Drawing, seeds: Sequence[int]) -> list[str]:
        """What follows each prompt, as text before the first text of `until`."""


class RunModel(HarnessModel):
    """A finished run of `normattn train`, as it is or under a post-hoc method."""

    def __init__(self, model: CausalLM, tokeniser: Tokeniser, spec: ScoreSpec) -> None:
        self._model, self._tokeniser = model.eval(), tokeniser
        self.train_length = model.config.train_length
        # Documents end in a separator, so it is what every document but the first follows.
        self.prefix = self.end = SEPARATOR_ID
        self.described = str(spec)
        self._on = model.using(spec)
        self.scorer = from_causal_lm(model)

    def encode(self, text: str, special: bool | None) -> list[int]:
        """The tokens of a text; a run has no special tokens to add."""
        return self._tokeniser.encode(text)

    def answers(self, prompts: Prompts, drawing: Drawing, seeds: Sequence[int]) -> list[str]:
        """What follows each prompt; a separator ends it too."""
        answers = generate(
            self._model,
            prompts,
            drawing.most,
            temperature=drawing.temperature,
            top_k=drawing.top_k,
            top_p=drawing.top_p,
            stop=[SEPARATOR_ID, *drawing.until],
            decode=self._tokeniser.decode,
            seed=seeds,
        )
        return [answer.text or "" for answer in answers]


class TransformersModel(HarnessModel):
    """A causal language model of transformers, as it is or extended."""

    def __init__(self, model: Any, tokeniser: Any, train_length: int, described: str) -> None:
        from transformers import GenerationConfig

        from normattn.hf import token_scorer
        from normattn.hf.model_parts import model_parts, moving

        self._model, self.chat = model.eval(), tokeniser
        self.train_length, self.described = train_length, described
        self.end = tokeniser.eos_token_id
        first = tokeniser.bos_token_id if tokeniser.bos_token_id is not None else self.end
        if first is None:
            raise InputError(
                "the tokeniser has neither a token that begins a text nor one that ends it, and a "
                "text without context must follow one of them"
            )
        self.prefix = int(first)
        self.alone = bool(moving(model_parts(model)))
        self._score = token_scorer(model)
        self._ends = _ends(model, self.end)
        # What the model's own says of generation would hold beside what a task asks for.
        make: Any = GenerationConfig
        self._model.generation_config = make(eos_token_id=list(self._ends) or None)

    def scorer(self, ids: Int[Tensor, "b t1"]) -> TokenScores:
        """Losses of tokens 1 … T, each row read as if it were the first."""
        self._begin()
        return self._score(ids)

    def _begin(self) -> None:
        """Make frequencies that grew with a longer text those of a short one again."""
        if self.alone:
            with torch.no_grad():
                self._model(torch.tensor([[self.prefix]], device=self._model.device))

    def encode(self, text: str, special: bool | None) -> list[int]:
        """The tokens of a text; a beginning that the text brings along is not doubled."""
        first = self.chat.bos_token
        if special is None and first and text.startswith(first):
            special = False
        options = {} if special is None else {"add_special_tokens": special}
        return [int(token) for token in self.chat(text, **options).input_ids]

    def answers(self, prompts: Prompts, drawing: Drawing, seeds: Sequence[int]) -> list[str]:
        """What follows each prompt; drawn tokens come from torch's global generator."""
        Sampling(drawing.temperature, drawing.top_k, drawing.top_p)
        ids, padding = left_padded(prompts, self._model.device)
        mask = torch.ones_like(ids) if padding is None else (~padding).long()
        options: dict[str, Any] = {"do_sample": drawing.temperature > 0}
        if drawing.temperature > 0:
            options |= {"temperature": drawing.temperature, "top_k": drawing.top_k or 0}
            options |= {"top_p": 1.0 if drawing.top_p is None else drawing.top_p}
        if drawing.until:
            options |= {"stop_strings": list(drawing.until), "tokenizer": self.chat}
        filler = self.prefix if self.end is None else self.end
        self._begin()
        with torch.no_grad():
            made = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=drawing.most,
                pad_token_id=filler,
                **options,
            )
        return [self._text(row, drawing.until) for row in made[:, ids.shape[1] :]]

    def _text(self, row: Int[Tensor, " t"], until: Sequence[str]) -> str:
        """The answer in one row, which a stopped row fills with padding."""
        tokens = list(takewhile(lambda token: token not in self._ends, row.tolist()))
        text = str(self.chat.decode(tokens, skip_special_tokens=True))
        return text[: min((at for at in map(text.find, until) if at >= 0), default=len(text))]


def _ends(model: Any, end: int | None) -> tuple[int, ...]:
    """The tokens that end a text, by the tokeniser or by what the model says of generation."""
    own = model.generation_config.eos_token_id
    own = [own] if isinstance(own, int) else list(own or ())
    return tuple(dict.fromkeys([*own, *([] if end is None else [end])]))


def open_run(
    run: Path,
    method: str,
    factor: float | int | None,
    parameters: dict[str, Any],
    device: str,
    dtype: str,
) -> RunModel:
    """The model of a finished run with a method switched on; raises `InputError`."""
    from normattn.cli.generation import opened
    from normattn.lab.training.distributed import choose_device
    from normattn.models import load_model

    config, tokeniser = opened(run)
    length, trained = config.model.train_length, config.model.score
    given = trained.with_method(method, **parameters)
    spec = given.resolve(length, factor)
    if factor is not None and _whole(given, length) == spec:
        raise InputError(f"{spec.method or 'the model as it is'} takes no factor")
    model = load_model(run / "model", config.model).to(choose_device(device), DTYPES[dtype])
    return RunModel(model, tokeniser, spec)


def _whole(spec: ScoreSpec, length: int) -> ScoreSpec | None:
    """The score without a factor, where it needs none."""
    try:
        return spec.resolve(length)
    except InputError:
        return None


def open_pretrained(
    name: str,
    gguf: str | None,
    method: str | None,
    train_length: int | None,
    parameters: dict[str, Any],
    device: str,
    dtype: str,
) -> TransformersModel:
    """A model of transformers: extended by `method`, as it was saved (None), or as trained."""
    from normattn.hf import extend
    from normattn.hf.load import read_tokeniser
    from normattn.hf.model_parts import known_length, model_parts
    from normattn.hf.saved import as_trained
    from normattn.lab.training.distributed import choose_device

    chosen_device = choose_device(device)
    model, saved = as_trained(name, gguf, dtype=DTYPES[dtype])
    tokeniser, extension = read_tokeniser(name, gguf), None
    if saved is not None and method is None:
        _refuse_length(train_length, saved["train_length"], name)
        extension = extend(model, saved["method"], train_length=saved["train_length"])
    elif method not in (None, "as is"):
        assert method is not None
        extension = extend(model, method, train_length=train_length, **parameters)
    model.to(chosen_device)
    if extension is not None:
        return TransformersModel(
            model, tokeniser, extension.resolved.train_length, str(extension.resolved)
        )
    length = train_length or known_length(model_parts(model))[0]
    return TransformersModel(model, tokeniser, length, "as is")


def _refuse_length(asked: int | None, saved: int, name: str) -> None:
    if asked not in (None, saved):
        raise InputError(
            f"train_length is {asked}, and {name} was saved as extended from {saved}: give a "
            "method to extend it from another length"
        )
