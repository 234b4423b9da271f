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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_likelihoods_are_those_of_the_logits(named: dict[str, Any], dtype: str, run: Path) -> None:
    """Right padding, contexts of any length and the context that is missing included."""
    tokeniser, logits = Tokeniser.load(run / "tokeniser.json"), logits_of({**named, "dtype": dtype})
    pairs = [(text, " word9 word1"[: 3 + 4 * n]) for n, text in enumerate((*TEXTS, ""))]
    expected = []
    for context, goal in pairs:
        before = tokeniser.encode(context) or [0]
        after = tokeniser.encode(context + goal)[len(before) if context else 0 :]
        expected.append(by_hand(logits, before + after, len(after)))
    for size in (1, 3, "auto"):
        lm = NormattnLM(**named, dtype=dtype, batch_size=size)
        found = lm.loglikelihood(requests(*pairs), disable_tqdm=True)
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
    lm = NormattnLM(**named, dtype="float64", max_length=longest, batch_size=2)
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
        lm = NormattnLM(**named, dtype="float64", batch_size=size)
        asked = [(text, dict(given)) for text in TEXTS]
        assert lm.generate_until(requests(*asked), disable_tqdm=True) == expected
    stop = expected[0][2:4]
    [ended] = lm.generate_until(requests((TEXTS[0], {**given, "until": [stop]})), disable_tqdm=True)
    assert ended == expected[0][: expected[0].index(stop)]
    drawn = {**given, "do_sample": True, "temperature": 2.0, "top_k": 50}
    assert lm.generate_until(requests((TEXTS[0], drawn)), disable_tqdm=True) != [expected[0]]


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

    def model(size: int) -> NormattnLM:
        return NormattnLM(pretrained=str(folder), train_length=8, batch_size=size)

    pairs = [(TEXTS[2] * n, " word1") for n in (3, 2, 1)] + [(TEXTS[1], " word1")]
    alone = [model(1).loglikelihood(requests(pair), disable_tqdm=True)[0][0] for pair in pairs]
    found = [total for total, _ in model(4).loglikelihood(requests(*pairs), disable_tqdm=True)]
    assert found == pytest.approx(alone, abs=1e-5)
    asked = [(text, {"max_gen_toks": 6, "until": []}) for text, _ in pairs]
    single = [model(1).generate_until(requests(one), disable_tqdm=True)[0] for one in asked]
    assert model(4).generate_until(requests(*asked), disable_tqdm=True) == single


def test_a_models_own_end_tokens_end_and_its_penalties_do_not_count(
    llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    asked = requests((TEXTS[0], {"max_gen_toks": 6, "until": []}))

    def answer(**generation: Any) -> str:
        (folder / "generation_config.json").write_text(json.dumps(generation))
        lm = NormattnLM(pretrained=str(folder))
        return str(lm.generate_until(asked, disable_tqdm=True)[0])

    plain = answer()
    assert answer(repetition_penalty=9.0, no_repeat_ngram_size=1) == plain
    logits = logits_of({"pretrained": str(folder), "dtype": "float32"})
    tokens: list[int] = []
    given = NormattnLM(pretrained=str(folder)).tok_encode(TEXTS[0])
    with torch.no_grad():
        for _ in range(3):
            tokens.append(int(logits(torch.tensor([given + tokens]))[0, -1].argmax()))
    ended = answer(eos_token_id=[0, tokens[2]])
    assert tokens[2] not in tokens[:2]
    assert len(ended) < len(plain)
    assert plain.startswith(ended)


def test_methods_read_on(run: Path, llama: Path, tmp_path: Path) -> None:
    """A method changes what is past the training length; it is kept in a saved model."""
    asked = requests((TEXTS[2], " word1"))

    def score(**arguments: Any) -> float:
        return float(NormattnLM(**arguments).loglikelihood(asked, disable_tqdm=True)[0][0])

    yarn: dict[str, Any] = {"method": "YaRN", "factor": 8}
    for named in ({"run": str(run)}, {"pretrained": str(llama)}):
        plain = score(**named)
        for method in (yarn, {"method": "ReRoPE-logn+", "window": 4}):
            assert abs(score(**named, **method) - plain) > 1e-4
    rerope: dict[str, Any] = {"method": "ReRoPE", "window": 4}
    ntk: dict[str, Any] = {"method": "NTK", "factor": 4}
    methods: list[dict[str, Any]] = [rerope, yarn, ntk]
    for way in methods:
        # YaRN and NTK are in transformers' own words as well.
        folder = tmp_path / way["method"]
        parameters: dict[str, Any] = {name: way[name] for name in way if name != "method"}
        model = normattn.hf.load(llama)[0]
        with normattn.extend(model, way["method"], **parameters):
            model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((llama / name).read_bytes())
        saved = str(folder)
        assert score(pretrained=saved) == score(pretrained=str(llama), **way)
        assert score(pretrained=saved, method="as is") == plain
        assert score(pretrained=saved, **rerope) == score(pretrained=str(llama), **rerope)
        with pytest.raises(InputError, match="train_length is 7, and"):
            score(pretrained=saved, train_length=7)


def test_what_would_be_cut_is_not_scored(named: dict[str, Any]) -> None:
    plain = NormattnLM(**named)
    asked = requests((TEXTS[2], " word1"))
    read = len(plain.tok_encode(TEXTS[2] + " word1")) - 1
    found = plain.loglikelihood(asked, disable_tqdm=True)
    assert NormattnLM(**named, max_length=read).loglikelihood(asked, disable_tqdm=True) == found
    with pytest.raises(InputError, match=f"would be cut to max_length={read - 1};"):
        NormattnLM(**named, max_length=read - 1).loglikelihood(asked, disable_tqdm=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "either run=RUN or pretrained=FOLDER"),
        ({"run": "a", "pretrained": "b"}, "either run=RUN or pretrained=FOLDER"),
        ({"run": "gone"}, "gone"),
        ({"pretrained": "."}, "holds no config.json"),
        ({"runn": 1, "run": "RUN"}, "runn: neither a setting of the model"),
        ({"run": "RUN", "factor": 2}, "factor: neither a setting"),
        ({"run": "RUN", "method": "YaRN", "windw": 2}, "windw"),
        ({"run": "RUN", "method": "ReRoPE", "window": 4, "factor": 2}, "takes no factor"),
        ({"run": "RUN", "method": "YARN"}, "did you mean YaRN"),
        ({"run": "RUN", "method": "YaRN", "factor": 0.5}, "factor is 0.5; expected"),
        ({"run": "RUN", "gguf": "x"}, "gguf belongs to pretrained"),
        ({"run": "RUN", "dtype": "int8"}, "dtype is 'int8'"),
        ({"run": "RUN", "batch_size": "many"}, "batch_size is 'many'"),
        ({"run": "RUN", "max_length": 0}, "max_length is 0"),
        ({"run": "RUN", "device": "tpu"}, "unknown device 'tpu'"),
    ],
)
def test_arguments_that_cannot_be(run: Path, arguments: dict[str, Any], expected: str) -> None:
    given: dict[str, Any] = {**arguments}
    if given.get("run") == "RUN":
        given["run"] = str(run)
    with pytest.raises(InputError, match=re.escape(expected)):
        NormattnLM(**given)


def test_requests_that_cannot_be(run: Path) -> None:
    lm = NormattnLM(run=str(run), max_length=4)
    with pytest.raises(InputError, match="would be cut to max_length=4"):
        lm.loglikelihood(requests(("a", TEXTS[2])), disable_tqdm=True)
    with pytest.raises(InputError, match="a prompt with an answer of 4 tokens has 5 tokens"):
        lm.generate_until(requests(("a", {"max_gen_toks": 4})), disable_tqdm=True)
    with pytest.raises(InputError, match="generation by num_beams is not offered"):
        lm.generate_until(requests(("a", {"num_beams": 4})), disable_tqdm=True)
    with pytest.raises(InputError, match="no chat template"):
        lm.apply_chat_template([{"role": "user", "content": "a"}])
