"""What `normattn extend` is given: lengths, methods with their parameters, and the whole of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from normattn.cli.model_options import ALL, Extend
from normattn.errors import InputError
from normattn.hf.model_parts import known_length, model_parts
from normattn.score.grammar import read
from normattn.score.parts import RopeScaling
from normattn.score.spec import UNMODIFIED, is_unmodified
from normattn.settings import Settings

WITH_LOGN = ("NTK", "YaRN", "ReRoPE", "LeakyReRoPE", "SelfExtend")
"""Log-n sharpens attention where more keys are near an angle that training had, so not with PI."""
EVERY = (
    *("PI", "ABF", "NTK", "NTK-mixed", "DynamicNTK", "YaRN", "ReRoPE", "LeakyReRoPE"),
    *("SelfExtend", "logn+", *(f"{name}-logn+" for name in WITH_LOGN)),
)
_FACTORS = {"factor", "s", "group"}


class ExtensionSettings(Settings):
    """The resolved settings of one directory; what is measured by any method depends on all.

    lengths: tokens of the tested contexts, ascending. windows: stretches of text. segment: how many
    last tokens are scored after every context. factor, window: parameters of the methods that leave
    them open. text: where the windows are from, tokens: their digest. weights: the model's digest.
    """

    model: str
    gguf: str | None
    text: tuple[str, ...]
    tokens: str
    lengths: tuple[int, ...] = Field(min_length=1)
    windows: int = Field(ge=1)
    segment: int = Field(ge=1)
    train_length: int = Field(ge=1)
    factor: float
    window: int
    dtype: Literal["fp32", "bf16"]
    seed: int = Field(ge=0)
    weights: str

    @property
    def passes(self) -> tuple[int, ...]:
        """Every length that is evaluated: the given ones and the training length."""
        return tuple(sorted({*self.lengths, self.train_length}))

    @property
    def name(self) -> str:
        """The model's name."""
        return model_name(self.gguf or self.model)

    def parameters(self, method: str) -> dict[str, Any]:
        """The parameters that `normattn.extend` takes in addition to the method's name."""
        return {name: getattr(self, name) for name in sorted(open_parameters(method))}


def model_name(address: str | Path) -> str:
    """How a model is called: the last part of its address, without ".gguf"."""
    return Path(address).name.removesuffix(".gguf")


def expand_methods(names: Sequence[str]) -> tuple[str, ...]:
    """The methods that are named, each once, the unmodified model first; `all` is every one."""
    methods = [UNMODIFIED]
    for name in names:
        methods += EVERY if name == ALL else () if is_unmodified(name) else (name,)
    return tuple(dict.fromkeys(methods))


def open_parameters(method: str) -> set[str]:
    """Which of `factor` and `window` a method takes and is not given in its own name."""
    parameters = set()
    for part, given in read(method)[0]:
        names = {field.name for field in dataclasses.fields(part)}
        if "window" in names - given.keys():
            parameters.add("window")
        # DynamicNTK follows the length and takes no factor.
        dynamic = issubclass(part, RopeScaling) and part.blockwise
        if not dynamic and names & _FACTORS and not given.keys() & _FACTORS:
            parameters.add("factor")
    return parameters


def refuse_unused(methods: Sequence[str], asked: Extend) -> None:
    """Raise `InputError` for a parameter that no method takes."""
    methods = [method for method in methods if method != UNMODIFIED]
    taken = {name for method in methods for name in open_parameters(method)}
    for name in ("factor", "window"):
        if getattr(asked, name) is not None and name not in taken:
            raise InputError(f"--{name} is given, but none of --methods takes a {name}")


class Chosen(NamedTuple):
    """What is evaluated, and the parameters of methods that leave them open."""

    train_length: int
    lengths: tuple[int, ...]
    factor: float
    window: int


def choose(asked: Extend, model: Any, lengths: tuple[int, ...] | None = None) -> Chosen:
    """What the options say, and where they are silent the model; `lengths` replace --lengths.

    The lengths are L and 2 L, the factor is the longest length over L, the window L / 4. Raises
    `InputError` for lengths within L that leave the factor open, and an L that is not known.
    """
    try:
        trained = asked.train_length or known_length(model_parts(model))[0]
    except InputError as error:
        raise InputError(
            str(error).replace("pass train_length=…", "pass --train-length")
        ) from error
    lengths = lengths or asked.lengths or (trained, 2 * trained)
    window = max(1, trained // 4) if asked.window is None else asked.window
    if asked.factor is None and lengths[-1] <= trained:
        raise InputError(
            f"the longest of --lengths, {lengths[-1]:,}, is within the training length of "
            f"{trained:,}: a factor below 1 would shorten the context; name a longer length"
        )
    factor = lengths[-1] / trained if asked.factor is None else asked.factor
    return Chosen(trained, lengths, factor, window)
