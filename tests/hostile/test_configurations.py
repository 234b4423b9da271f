"""Odd values in a configuration of positions, and odd tokenisers: one sentence, never a traceback.

A table of what was once a traceback and its neighbours, and a seeded share of random nested
configurations. A value that a model can be computed with may pass.
"""

from __future__ import annotations

import contextlib
import json
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import normattn
from normattn.errors import InputError
from normattn.hf import load, token_scorer
from normattn.hf.load import read_tokeniser
from normattn.hf.tiny_model import in_float64, read_configuration, small_model

from .foreign import Damage, configured, copy_of, write_model

INFINITE, NAN = float("inf"), float("nan")
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}


def _rope(**changed: Any) -> dict[str, Any]:
    return {"rope_parameters": {**YARN, **changed}}


ODD: dict[str, dict[str, Any]] = {
    "a share without end": {"partial_rotary_factor": INFINITE},
    "a share that is a list": {"partial_rotary_factor": [None]},
    "a share that is text": _rope(partial_rotary_factor="0.5"),
    "a factor without end": _rope(factor=INFINITE),
    "a factor that is no number": _rope(factor=NAN),
    "a factor that is truth": _rope(factor=True),
    "a base that is a list": _rope(rope_theta=[1e4]),
    "a base too small": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e-300}},
    "a kind that is a list": _rope(rope_type=["yarn"]),
    "a length that is text": _rope(original_max_position_embeddings="32"),
    "factors by feature that are a number": {"rope_parameters": {**LONG, "short_factor": 2.0}},
    "factors by feature of text": {"rope_parameters": {**LONG, "long_factor": ["a"] * 8}},
    "factors by feature of lists": {"rope_parameters": {**LONG, "long_factor": [[1.0]] * 8}},
    "factors by feature without end": {"rope_parameters": {**LONG, "short_factor": [INFINITE] * 8}},
    "sections that are text": _rope(mrope_section="1,2"),
    "rope as a list": {"rope_parameters": [YARN]},
    "older rope as text": {"rope_parameters": None, "rope_scaling": "linear"},
    "rope by layer type, odd inside": {
        "rope_parameters": {"full_attention": _rope(beta_fast={"a": 1})["rope_parameters"]}
    },
    "a length without end": {"max_position_embeddings": INFINITE},
    "a window that is text": {"sliding_window": "8"},
    "types of layers that are numbers": {"layer_types": [1, 2]},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "whole"
    write_model(folder)
    return folder


def _score(place: Path) -> None:
    list(normattn.score_of(in_float64(small_model(read_configuration(place)))).lines())


def _extend(place: Path) -> None:
    normattn.extend(load(place)[0], "YaRN", factor=2.0)


def _verify(whole: Path, place: Path) -> None:
    normattn.verify(whole, place)
    normattn.verify(place, place, "YaRN(factor=4)")


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("command", ["score", "extend", "verify"])
def test_an_odd_value_is_refused(odd: str, command: str, whole: Path, tmp_path: Path) -> None:
    place = copy_of(whole, tmp_path / "hostile-model", configured(**ODD[odd]))
    readers: dict[str, Callable[[Path], None]] = {
        "score": _score,
        "extend": _extend,
        "verify": partial(_verify, whole),
    }
    with pytest.raises(InputError):
        readers[command](place)


KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "own")
FIELDS = (
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor"),
    *("high_freq_factor", "short_factor", "long_factor", "partial_rotary_factor", "truncate"),
    *("mrope_section", "full_attention", "sliding_attention", "alpha"),
)
WHOLE = (
    *("rope_theta", "partial_rotary_factor", "max_position_embeddings", "head_dim", "normattn"),
    *("sliding_window", "layer_types", "rms_norm_eps", "num_key_value_heads", "text_config"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 3, 0.5, 1e300, 1e-300, INFINITE, -INFINITE, NAN, 10**12),
    *("", "x", "8", "yarn", [], [1], [None], ["a"], [[1]], [1.0] * 8, {}, {"a": 1}, {"a": [1]}),
)


def _random_fields(drawn: random.Random) -> dict[str, Any]:
    """A configuration's fields, one or two of them odd, at the top or inside of its rope."""
    if drawn.random() < 0.4:
        return {drawn.choice(WHOLE): drawn.choice(VALUES)}
    rope: dict[str, Any] = {"rope_type": drawn.choice(KINDS), "rope_theta": 1e4, "factor": 4.0}
    if drawn.random() < 0.5:
        rope["original_max_position_embeddings"] = 32
    for _ in range(drawn.randint(1, 2)):
        rope[drawn.choice(FIELDS)] = drawn.choice(VALUES)
    if drawn.random() < 0.2:
        rope = {"full_attention": rope, "sliding_attention": drawn.choice(VALUES)}
    return {drawn.choice(("rope_parameters", "rope_scaling")): rope}


@pytest.mark.parametrize("seed", range(24))
def test_random_fields_are_computed_with_or_refused(seed: int, whole: Path, tmp_path: Path) -> None:
    fields = _random_fields(random.Random(seed))
    place = copy_of(whole, tmp_path / "hostile-model", configured(**fields))
    for read in (_score, _extend, partial(_verify, whole)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(InputError):
                read(place)


def test_values_that_models_have_are_read(whole: Path, tmp_path: Path) -> None:
    """Whole numbers, None, and lists of factors are what configurations hold."""
    factors = {"short_factor": [1] * 8, "long_factor": [2.0] * 8, "attention_factor": None}
    for number, fields in enumerate(
        (
            {"rope_parameters": {**LONG, **factors}},
            _rope(original_max_position_embeddings=16, mscale=1, truncate=False),
            {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        )
    ):
        _score(copy_of(whole, tmp_path / f"model-{number}", configured(**fields)))


def _moved(by: int) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "tokenizer.json"
        fields = json.loads(file.read_text())
        vocabulary = fields["model"]["vocab"]
        fields["model"]["vocab"] = {piece: number + by for piece, number in vocabulary.items()}
        file.write_text(json.dumps(fields))

    return damage


@pytest.mark.parametrize("by", [200, 1 << 20, 1 << 31])
def test_tokens_beyond_the_vocabulary_are_refused(by: int, whole: Path, tmp_path: Path) -> None:
    model, tokeniser = load(copy_of(whole, tmp_path / "other", _moved(by)))
    letters = torch.tensor([tokeniser("words")["input_ids"]])
    with pytest.raises(InputError, match="256"):
        token_scorer(model)(letters)


@pytest.mark.parametrize("longest", ["x", [], {"a": 1}, True])
def test_a_tokeniser_whose_length_is_no_number_is_refused(
    longest: Any, whole: Path, tmp_path: Path
) -> None:
    def damage(folder: Path) -> None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": longest}))

    with pytest.raises(InputError, match="model_max_length"):
        read_tokeniser(copy_of(whole, tmp_path / "other", damage))
