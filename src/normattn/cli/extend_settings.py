"""The settings of `normattn extend`: lengths, methods and their parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from normattn.cli.model_options import ALL, Extend
from normattn.errors import InputError
from normattn.hf.model_parts import known_length, model_parts
from normattn.score.grammar import read
from normattn.score.parts import RopeScaling
from normattn.score.spec import UNMODIFIED, is_unmodified
from normattn.settings import Settings

_EVALUATION = ("text", "windows", "passkey", "dtype", "device", "seed", "save")
"""Options that `--emit`, which evaluates nothing, does not use."""
LOGN_METHODS = ("NTK", "YaRN", "ReRoPE", "LeakyReRoPE", "SelfExtend")
"""The methods that are also tried with logn+."""
ALL_METHODS = (
    *("PI", "ABF", "NTK", "NTK-mixed", "DynamicNTK", "YaRN", "ReRoPE", "LeakyReRoPE"),
    *("SelfExtend", "logn+", *(f"{name}-logn+" for name in LOGN_METHODS)),
)
_FACTORS = {"factor", "s", "group"}


class ExtensionSettings(Settings):
    """The resolved settings of one directory; every measurement in it depends on all of them.

    `tokens` is the digest of the `windows` of `text`. The last `segment` tokens are scored after
    every context of `lengths`. `factor` and `window` are for methods that do not set them.
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


def model_name(address: str | Path) -> str:
    """A model's name: the last part of its address, without ".gguf"."""
    return Path(address).name.removesuffix(".gguf")


def expand_methods(names: Sequence[str]) -> tuple[str, ...]:
    """The named methods, each once, after the unmodified model; `all` names every one."""
    methods = [UNMODIFIED]
    for name in names:
        methods += ALL_METHODS if name == ALL else () if is_unmodified(name) else (name,)
    return tuple(dict.fromkeys(methods))


def open_parameters(method: str) -> set[str]:
    """The parameters among `factor` and `window` that a method has and its name does not set."""
    parameters = set()
    for part, values in read(method)[0]:
        names = {field.name for field in dataclasses.fields(part)}
        if "window" in names - values.keys():
            parameters.add("window")
        # DynamicNTK follows the length and takes no factor.
        dynamic = issubclass(part, RopeScaling) and part.blockwise
        if not dynamic and names & _FACTORS and not values.keys() & _FACTORS:
            parameters.add("factor")
    return parameters


def refuse_unused(methods: Sequence[str], args: Extend) -> None:
    """Raise `InputError` for an option without effect: of `--emit`, or that no method takes."""
    for name in ("engine_version",) if args.emit is None else _EVALUATION:
        if getattr(args, name) != getattr(Extend, name):
            unused = "is only for" if args.emit is None else "has no effect with"
            raise InputError(f"--{name.replace('_', '-')} {unused} --emit")
    methods = [method for method in methods if method != UNMODIFIED]
    used = {name for method in methods for name in open_parameters(method)}
    for name in ("factor", "window"):
        if getattr(args, name) is not None and name not in used:
            raise InputError(f"--{name} is given, but none of --methods takes a {name}")


def choose_values(
    args: Extend, model: Any, lengths: tuple[int, ...] | None = None
) -> tuple[int, tuple[int, ...], float, int]:
    """(training length L, lengths, factor, window) as given, or defaults for the model.

    The default lengths are L and 2 L, the factor is the longest / L, the window L / 4. `lengths`
    replace --lengths. Raises `InputError` for lengths within L where a method needs a factor.
    """
    try:
        trained = args.train_length or known_length(model_parts(model))[0]
    except InputError as error:
        sentence = str(error).replace("pass train_length=…", "pass --train-length")
        raise InputError(sentence) from error
    with_text = "" if lengths is None else " that has enough text"
    lengths = lengths or args.lengths or (trained, 2 * trained)
    window = max(1, trained // 4) if args.window is None else args.window
    takes_factor = any("factor" in open_parameters(x) for x in expand_methods(args.methods)[1:])
    if args.factor is None and takes_factor and lengths[-1] <= trained:
        raise InputError(
            f"the longest of --lengths{with_text}, {lengths[-1]:,}, is within the training length "
            f"of {trained:,}, so it gives no factor above 1: name a longer length, or give --factor"
        )
    factor = lengths[-1] / trained if args.factor is None else args.factor
    return trained, lengths, factor, window
