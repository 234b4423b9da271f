"""lm-evaluation-harness: our models answer as they score by themselves."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import normattn
from normattn import InputError
from normattn.cli.harness import NormattnLM
from normattn.lab.data.tokeniser import Tokeniser

from .conftest import by_hand, logits_of

TEXTS = ("word1 word2", "word3", "word4 word5 word6 word7 word8 word9")
PAIR = (TEXTS[2], " word1")


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def model(**arguments: Any) -> NormattnLM:
    return NormattnLM(**{"device": "cpu", "dtype": "float64", **arguments})


def likelihood(pair: tuple[str, str], **arguments: Any) -> float:
    return float(model(**arguments).loglikelihood(requests(pair), disable_tqdm=True)[0][0])


def test_likelihoods_are_those_of_the_logits(named: dict[str, Any], run: Path) -> None:
    """Padding, contexts of any length and the context that is missing included."""
    tokeniser, logits = Tokeniser.load(run / "tokeniser.json"), logits_of(named)
    pairs = [(text, " word9 word1"[: 4 + 4 * n]) for n, text in enumerate((*TEXTS, ""))]
    expected = []
    for context, goal in pairs:
        before = tokeniser.encode(context) or [0]
        after = tokeniser.encode(context + goal)[len(before) if context else 0 :]
        expected.append(by_hand(logits, before + after, len(after)))
    for size in (1, 3):
        found = model(**named, batch_size=size).loglikelihood(requests(*pairs), disable_tqdm=True)
        assert [right for _, right in found] == [right for _, right in expected]
        assert [total for total, _ in found] == pytest.approx([x for x, _ in expected], abs=1e-5)


@pytest.mark.parametrize("longest", [None, 5])
def test_whole_texts_are_read_in_windows(
    named: dict[str, Any], run: Path, longest: int | None
) -> None:
    """Every token once; the last window is filled up with tokens that were scored before."""
    tokens = Tokeniser.load(run / "tokeniser.json").encode(TEXTS[2])
    size, total, logits = longest or 8, 0.0, logits_of(named)
    assert len(tokens) > 2 * size
    for at in range(0, len(tokens), size):
        end = min(at + size, len(tokens))
        start = max(0, end - size)
        before = 0 if start == 0 else tokens[start - 1]
        total += by_hand(logits, [before, *tokens[start:end]], end - at)[0]
    lm = model(**named, max_length=longest, batch_size=2)
    found = lm.loglikelihood_rolling(requests((TEXTS[2],), (TEXTS[1],)), disable_tqdm=True)
    assert found[0] == pytest.approx(total, abs=1e-5)


def test_answers_are_greedy_and_end(named: dict[str, Any], run: Path) -> None:
    tokeniser, logits = Tokeniser.load(run / "tokeniser.json"), logits_of(named)
    expected = []
    for text in TEXTS:
        tokens = tokeniser.encode(text)
        first = len(tokens)
        while len(tokens) < first + 6:
            with torch.no_grad():
                token = int(logits(torch.tensor([tokens]))[0, -1].argmax())
            if token == 0:
                break
            tokens.append(token)
        expected.append(tokeniser.decode(tokens[first:]))
    given = {"until": [], "max_gen_toks": 6, "do_sample": False}
    for size in (1, 3):
        asked = requests(*[(text, dict(given)) for text in TEXTS])
        assert model(**named, batch_size=size).generate_until(asked, disable_tqdm=True) == expected
    stop = expected[0][2:4]
    asked = requests((TEXTS[0], {**given, "until": [stop]}))
    [ended] = model(**named).generate_until(asked, disable_tqdm=True)
    assert ended == expected[0][: expected[0].index(stop)]


def test_methods_change_what_is_past_the_training_length(
    run: Path, llama: Path, tmp_path: Path
) -> None:
    """And a saved model keeps its method."""
    ways: list[dict[str, Any]] = [
        {"method": "YaRN", "factor": 8},
        {"method": "ReRoPE", "window": 4},
    ]
    for named in ({"run": str(run)}, {"pretrained": str(llama)}):
        plain = likelihood(PAIR, **named)
        for way in ways:
            assert abs(likelihood(PAIR, **named, **way) - plain) > 1e-5
    for way in ways:
        folder = tmp_path / way["method"]
        parameters = {name: value for name, value in way.items() if name != "method"}
        loaded = normattn.hf.load(llama)[0]
        with normattn.extend(loaded, way["method"], **parameters):
            loaded.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(llama / name, folder / name)
        saved = str(folder)
        assert likelihood(PAIR, pretrained=saved) == likelihood(PAIR, pretrained=str(llama), **way)
        assert likelihood(PAIR, pretrained=saved, method="unmodified") == plain
        with pytest.raises(InputError, match="train_length is 7"):
            model(pretrained=saved, train_length=7)


def test_an_adapter_is_read_under_a_method(llama: Path, tmp_path: Path) -> None:
    """`peft=` is the harness's own option."""
    peft = pytest.importorskip("peft")
    base = normattn.hf.load(llama)[0]
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    named: dict[str, Any] = {"pretrained": str(llama), "peft": str(tmp_path / "adapter")}
    plain = likelihood(PAIR, **named)
    assert abs(plain - likelihood(PAIR, pretrained=str(llama))) > 1e-5
    assert abs(plain - likelihood(PAIR, **named, method="YaRN", factor=8)) > 1e-5


def test_what_would_be_cut_is_not_scored(named: dict[str, Any]) -> None:
    plain, asked = model(**named), requests(PAIR)
    read = len(plain.tok_encode("".join(PAIR))) - 1
    found = plain.loglikelihood(asked, disable_tqdm=True)
    assert model(**named, max_length=read).loglikelihood(asked, disable_tqdm=True) == found
    with pytest.raises(InputError, match=f"max_length={read - 1}"):
        model(**named, max_length=read - 1).loglikelihood(asked, disable_tqdm=True)
    prompt = requests((TEXTS[2], {"max_gen_toks": 4, "until": []}))
    with pytest.raises(InputError, match="max_length=8"):
        model(**named, max_length=8).generate_until(prompt, disable_tqdm=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "either run=RUN or pretrained=FOLDER"),
        ({"run": "a", "pretrained": "b"}, "either run=RUN or pretrained=FOLDER"),
        ({"run": "gone"}, "gone"),
        ({"pretrained": "."}, "config.json"),
        ({"runn": 1, "run": "RUN"}, "runn"),
        ({"run": "RUN", "factor": 2}, "factor"),
        ({"run": "RUN", "method": "YaRN", "windw": 2}, "windw"),
        ({"pretrained": "LLAMA", "windw": 2}, "windw"),
        ({"run": "RUN", "method": "YARN"}, "did you mean YaRN"),
        ({"run": "RUN", "method": "YaRN", "factor": 0.5}, "factor is 0.5"),
        ({"run": "RUN", "gguf_file": "x"}, "gguf_file belongs to pretrained"),
        ({"run": "RUN", "dtype": "int8"}, "dtype is 'int8'"),
        ({"run": "RUN", "max_length": 0}, "max_length is 0"),
    ],
)
def test_arguments_that_cannot_be(
    run: Path, llama: Path, arguments: dict[str, Any], expected: str
) -> None:
    places = {"RUN": str(run), "LLAMA": str(llama)}
    given = {key: places.get(str(value), value) for key, value in arguments.items()}
    with pytest.raises(InputError, match=re.escape(expected)):
        NormattnLM(**given)
