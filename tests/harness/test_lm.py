"""lm-evaluation-harness: our models answer as they score by themselves."""

from __future__ import annotations

import json
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

from .expected import by_hand, logits_of

TEXTS = ("word1 word2", "word3", "word4 word5 word6 word7 word8 word9")


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def model(**arguments: Any) -> NormattnLM:
    return NormattnLM(**{"device": "cpu", "dtype": "float64", **arguments})


def likelihood(pair: tuple[str, str], **arguments: Any) -> float:
    return float(model(**arguments).loglikelihood(requests(pair), disable_tqdm=True)[0][0])


def test_likelihoods_are_those_of_the_logits(named: dict[str, Any], run: Path) -> None:
    """Padding, contexts of any length and the context that is missing included."""
    tokeniser, logits = Tokeniser.load(run / "tokeniser.json"), logits_of(named)
    pairs = [(text, "\nword9\nword1"[: 4 + 4 * n]) for n, text in enumerate((*TEXTS, ""))]
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
    size, total, at = longest or 8, 0.0, 0
    logits = logits_of(named)
    assert len(tokens) > 2 * size
    while at < len(tokens):
        end = min(at + size, len(tokens))
        start = max(0, end - size)
        before = 0 if start == 0 else tokens[start - 1]
        total += by_hand(logits, [before, *tokens[start:end]], end - at)[0]
        at = end
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
        answers = model(**named, batch_size=size).generate_until(asked, disable_tqdm=True)
        assert answers == expected
    stop = expected[0][2:4]
    asked = requests((TEXTS[0], {**given, "until": [stop]}))
    [ended] = model(**named).generate_until(asked, disable_tqdm=True)
    assert ended == expected[0][: expected[0].index(stop)]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rows_are_read_alone_where_others_would_change_them(
    llama: Path, tmp_path: Path, kind: str
) -> None:
    """Frequencies that follow the longest row, or the longest text that was read before."""
    folder = tmp_path / kind
    shutil.copytree(llama, folder)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
        rope |= {"original_max_position_embeddings": 8}
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    named: dict[str, Any] = {"pretrained": str(folder), "train_length": 8}
    pairs = [(TEXTS[2] * n, "\nword1") for n in (3, 2, 1)] + [(TEXTS[1], "\nword1")]
    alone = [likelihood(pair, **named) for pair in pairs]
    asked = requests(*pairs)
    together = model(**named, batch_size=4).loglikelihood(asked, disable_tqdm=True)
    assert [total for total, _ in together] == pytest.approx(alone, abs=1e-5)


def test_methods_read_on(run: Path, llama: Path, tmp_path: Path) -> None:
    """A method changes what is past the training length; a saved model keeps it."""
    pair = (TEXTS[2], "\nword1")
    yarn: dict[str, Any] = {"method": "YaRN", "factor": 8}
    rerope: dict[str, Any] = {"method": "ReRoPE", "window": 4}
    for named in ({"run": str(run)}, {"pretrained": str(llama)}):
        plain = likelihood(pair, **named)
        for way in (yarn, rerope):
            assert abs(likelihood(pair, **named, **way) - plain) > 1e-5
    for way in (yarn, rerope):
        folder = tmp_path / way["method"]
        parameters: dict[str, Any] = {name: way[name] for name in way if name != "method"}
        loaded = normattn.hf.load(llama)[0]
        with normattn.extend(loaded, way["method"], **parameters):
            loaded.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((llama / name).read_bytes())
        saved = str(folder)
        assert likelihood(pair, pretrained=saved) == likelihood(pair, pretrained=str(llama), **way)
        assert likelihood(pair, pretrained=saved, method="as is") == plain
        with pytest.raises(InputError, match="train_length is 7, and"):
            model(pretrained=saved, train_length=7)


def test_an_adapter_is_read_under_a_method(llama: Path, tmp_path: Path) -> None:
    """`peft=` is the harness's own option."""
    peft = pytest.importorskip("peft")
    base = normattn.hf.load(llama)[0]
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapter")
    named: dict[str, Any] = {"pretrained": str(llama), "peft": str(tmp_path / "adapter")}
    pair = (TEXTS[2], "\nword1")
    plain = likelihood(pair, **named)
    assert abs(plain - likelihood(pair, pretrained=str(llama))) > 1e-5
    assert abs(plain - likelihood(pair, **named, method="YaRN", factor=8)) > 1e-5


def test_what_would_be_cut_is_not_scored(named: dict[str, Any]) -> None:
    plain = model(**named)
    asked = requests((TEXTS[2], "\nword1"))
    read = len(plain.tok_encode(TEXTS[2] + "\nword1")) - 1
    found = plain.loglikelihood(asked, disable_tqdm=True)
    assert model(**named, max_length=read).loglikelihood(asked, disable_tqdm=True) == found
    with pytest.raises(InputError, match=f"would be cut to max_length={read - 1};"):
        model(**named, max_length=read - 1).loglikelihood(asked, disable_tqdm=True)
    prompt, short = (
        requests((TEXTS[2], {"max_gen_toks": 4, "until": []})),
        model(**named, max_length=8),
    )
    with pytest.raises(InputError, match="a prompt with an answer of 4 tokens has"):
        short.generate_until(prompt, disable_tqdm=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "either run=RUN or pretrained=FOLDER"),
        ({"run": "a", "pretrained": "b"}, "either run=RUN or pretrained=FOLDER"),
        ({"run": "gone"}, "gone"),
        ({"pretrained": "."}, "holds no config.json"),
        ({"runn": 1, "run": "RUN"}, "runn: neither a parameter"),
        ({"run": "RUN", "factor": 2}, "factor is given without a method"),
        ({"run": "RUN", "method": "YaRN", "windw": 2}, "windw"),
        ({"run": "RUN", "method": "YARN"}, "did you mean YaRN"),
        ({"run": "RUN", "method": "YaRN", "factor": 0.5}, "factor is 0.5; expected"),
        ({"run": "RUN", "gguf_file": "x"}, "gguf_file belongs to pretrained"),
        ({"run": "RUN", "dtype": "int8"}, "dtype is 'int8'"),
        ({"run": "RUN", "max_length": 0}, "max_length is 0"),
    ],
)
def test_arguments_that_cannot_be(run: Path, arguments: dict[str, Any], expected: str) -> None:
    given: dict[str, Any] = {**arguments}
    if given.get("run") == "RUN":
        given["run"] = str(run)
    with pytest.raises(InputError, match=re.escape(expected)):
        NormattnLM(**given)
