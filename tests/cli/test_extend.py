"""`normattn extend`: what it measures, keeps, advises and saves, and what it refuses."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import apart
import normattn
from hostile.foreign import write_model
from normattn.cli import extend_reading
from normattn.cli.extend_reading import passkey_set, prepare_texts
from normattn.cli.extend_settings import expand_methods
from normattn.cli.model_options import method_names
from normattn.cli.parsing import names, token_counts
from studies.conftest import Command
from studies.conftest import run as run_command
from undrawn import undraw

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

LENGTH = 128
_DYING = """
import os, signal
from normattn.cli.app import main
from normattn.cli.extend_reading import Evaluator
read, reads = Evaluator.evaluate, []

def dying(*arguments):
    if len(reads) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    reads.append(1)
    return read(*arguments)

Evaluator.evaluate = dying
main({arguments})
"""
# Short: a training length of 32 instead of the configuration's, and no pass key.
SHORT = ("--train-length", 32, "--lengths", "48,64", "--no-passkey")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama and a tokeniser whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    _save(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(" ".join(f"word{(i * i) % 97}" for i in range(600))[:3000])
    return path


@pytest.fixture(scope="module")
def done(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with pass keys, under PI and ReRoPE-logn+."""
    out = tmp_path_factory.mktemp("runs") / "done"
    arguments = ("extend", model, "--text", text, "--methods", "PI,ReRoPE-logn+")
    with pytest.MonkeyPatch.context() as patch:
        undraw(patch)
        assert run_command(*arguments, "--lengths", "192,256", "--out", out) == 0
    return out


def _save(folder: Path, **changed: Any) -> None:
    sizes: dict[str, Any] = {"intermediate_size": 32, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    write_model(folder, **sizes, initializer_range=0.3, **changed)


def _value(out: Path, asked: str, table: str, column: str) -> float:
    stored = json.loads((out / "table.json").read_text())["tables"]
    (found,) = (line[column] for line in stored[table] if line["row"] == asked)
    return float(found["value"])


def test_a_run_says_what_was_read(command: Command, done: Path, tmp_path: Path) -> None:
    config = json.loads((done / "config.json").read_text())["config"]
    assert (config["lengths"], config["segment"]) == ([192, 256], LENGTH // 8)
    assert (config["train_length"], config["factor"], config["window"]) == (LENGTH, 2.0, 32)
    assert json.loads((done / "status.json").read_text())["state"] == "finished"
    names = {path.name for path in (done / "figures").iterdir()}
    assert names == {"last_segment.png", "reading_by_position.png"}
    table = (done / "table.md").read_text()
    scored = "The last 16 tokens of every window are scored."
    assert all(said in table for said in ("PI(factor=2)", "There are no intervals", scored))
    assert _value(done, "unmodified", "prefill", "keys_256") == 0
    assert _value(done, "PI", "prefill", "seconds_256") > 0
    # The page is made of its measurements alone.
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "measurements.parquet"):
        shutil.copy(done / name, copy / name)
    command.done("report", copy, "--out", copy)
    for name in ("table.md", "table.json", "prefill.csv", "measurements.parquet"):
        assert (copy / name).read_bytes() == (done / name).read_bytes()


@pytest.mark.parametrize("length", [128, 256])
def test_losses_are_those_of_transformers(done: Path, model: Path, text: Path, length: int) -> None:
    """Unmodified, and PI as transformers' own linear scaling."""
    tokeniser = transformers.AutoTokenizer.from_pretrained(model)
    texts, _, _ = prepare_texts(tokeniser, [str(text)], [192, 256], 2, 0)
    ids = torch.from_numpy(texts.ids)[:, -length - 1 :]
    assert tokeniser.decode(ids[0]) in text.read_text()
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    for asked, options in (("unmodified", {}), ("PI", {"rope_parameters": linear})):
        own = transformers.AutoModelForCausalLM.from_pretrained(model, **options)
        with torch.no_grad():
            logits = own(ids[:, :-1]).logits.double()
        loss = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
        expected = {("table", f"loss_{length}"): loss[:, -16:]}
        if length == LENGTH:
            expected["cost", "loss"] = loss
        for place, losses in expected.items():
            found = _value(done, asked, *place)
            assert found == pytest.approx(float(losses.mean()), abs=1e-5)


def test_the_pass_key_stands_where_it_is_said(model: Path, text: Path) -> None:
    tokeniser = transformers.AutoTokenizer.from_pretrained(model)
    texts, _, _ = prepare_texts(tokeniser, [str(text)], [256], 2, 0)
    made = passkey_set(tokeniser, texts, 1, 256, LENGTH, 0)
    whole = tokeniser.decode(made.windows[0, 0])
    answer = tokeniser.decode(made.windows[0, 0, 1:][made.scored[0]])
    assert whole.endswith(f"What is the pass key? The pass key is{answer}")
    assert whole.count(answer.strip()) == 3
    assert f"\nThe pass key is{answer}." in whole
    assert made.depths == (0.75,)
    assert made.windows.shape == (1, 1, 257)


def test_what_the_tokeniser_puts_first_stands_first(model: Path, text: Path) -> None:
    tokeniser = transformers.AutoTokenizer.from_pretrained(model)
    tokeniser._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="! $A", special_tokens=[("!", tokeniser.convert_tokens_to_ids("!"))]
    )
    texts, _, _ = prepare_texts(tokeniser, [str(text)], [32, 64], 2, 0)
    for length in (32, 64):
        window = texts.window(0, length)
        assert len(window) == length + 1
        assert tokeniser.decode(window)[0] == "!"
        assert window[1:].tolist() == texts.ids[0, -length:].tolist()


def test_a_killed_run_goes_on(
    command: Command, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    arguments = ("extend", model, "--text", text, "--methods", "YaRN", *SHORT, "--out", out)
    ended = apart.run(_DYING.format(arguments=[str(each) for each in arguments]))
    assert ended.code == -signal.SIGKILL, ended.err
    kept = {path: path.read_bytes() for path in out.glob("measurements/*.parquet")}
    assert len(kept) == 5
    read, reads = extend_reading.Evaluator.evaluate, []

    def noting(self: extend_reading.Evaluator, place: Any, cell: Any) -> object:
        reads.append(place)
        return read(self, place, cell)

    monkeypatch.setattr(extend_reading.Evaluator, "evaluate", noting)
    said = command.done(*arguments)
    assert "by the first window, the rest takes about" in said.err
    assert "In short" in said.out
    assert str(out / "report.html") in said.out
    assert len(reads) == 12 - 5  # 2 methods × 3 lengths × 2 windows
    assert {path: path.read_bytes() for path in kept} == kept
    # Another method joins; what is there is not read again.
    reads.clear()
    said = command.done(*(each if each != "YaRN" else "YaRN,NTK" for each in arguments))
    assert {place.method for place in reads} == {"NTK"}
    assert "NTK(factor=2)" in (out / "table.md").read_text()
    assert "has another configuration" in command(*arguments, "--seed", 1).last


def test_out_of_memory_says_what_fits_and_keeps_the_rest(
    command: Command, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = normattn.hf.token_scorer

    def small(model: object) -> object:
        def scored(ids: torch.Tensor) -> object:
            if ids.shape[1] > 60 and normattn.hf.extension_of(model) is not None:
                raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to …")
            return make(model)(ids)

        return scored

    monkeypatch.setattr("normattn.cli.extend.token_scorer", small)
    out = tmp_path / "run"
    said = command("extend", model, "--text", text, "--methods", "YaRN", *SHORT, "--out", out)
    assert said.code == 1
    assert said.err.splitlines()[-1] == (
        "normattn: out of memory with YaRN at 64 tokens: take shorter --lengths or --dtype bf16; "
        "what was measured is kept"
    )
    assert "Traceback" not in said.err
    assert _value(out, "YaRN", "table", "loss_48") > 0
    assert json.loads((out / "status.json").read_text())["state"] == "interrupted"


def test_saved_it_is_extended(command: Command, model: Path, text: Path, tmp_path: Path) -> None:
    saved, out = tmp_path / "longer", tmp_path / "run"
    arguments = ("extend", model, "--text", text, "--methods", "ReRoPE", *SHORT, "--out", out)
    said = command.done(*arguments, "--save", saved)
    assert f'normattn.from_pretrained("{saved}")' in said.out
    again = normattn.from_pretrained(str(saved))
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    ids = torch.arange(64)[None]
    with torch.no_grad(), normattn.extend(plain, "ReRoPE", window=8, train_length=32):
        torch.testing.assert_close(again(ids).logits, plain(ids).logits)
    assert transformers.AutoTokenizer.from_pretrained(saved)("abc")["input_ids"]
    assert "exists already" in command(*arguments, "--save", saved).sentence


def test_saved_it_is_read_plain(command: Command, model: Path, text: Path, tmp_path: Path) -> None:
    """Transformers would apply what its own words say, and a method stretch that once more."""
    loaded, tokeniser = normattn.hf.load(model)
    with normattn.extend(loaded, "NTK", factor=4):
        loaded.save_pretrained(tmp_path / "ntk")
    tokeniser.save_pretrained(tmp_path / "ntk")
    rest = ("--text", text, "--methods", "PI", "--windows", 2, "--lengths", 256, "--no-passkey")
    for name, folder in (("plain", model), ("saved", tmp_path / "ntk")):
        command.done("extend", folder, *rest, "--out", tmp_path / name)
    for row in ("unmodified", "PI"):
        losses = [_value(tmp_path / out, row, "table", "loss_256") for out in ("plain", "saved")]
        assert losses[0] == losses[1]
    said = command("extend", tmp_path / "ntk", "--methods", "NTK(factor=2)", "--emit", "hf")
    assert "was saved under NTK(factor=4)" in said.sentence


def test_lengths_and_methods_as_typed() -> None:
    assert token_counts("16k, 8k,12000", "--lengths") == (8192, 12000, 16384)
    named = method_names("LeakyReRoPE(s=4,window=8),YaRN-logn+", "--methods")
    assert named == names("LeakyReRoPE(s=4,window=8), YaRN-logn+", "--methods")
    assert expand_methods(named) == (*("unmodified", "LeakyReRoPE(s=4,window=8)"), "YaRN-logn+")
    assert {"PI", "SelfExtend", "ReRoPE-logn+"} < set(expand_methods(["all"]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--methods", "YARN2"), "YARN2"),
        (("--methods", "YaRN,,PI"), "--methods holds an empty name"),
        (("--lengths", "8q"), "such as 8k,16k,32000 (8k is 8192), but it has '8q'"),
        (("--lengths", "64,64"), "--lengths names a length twice"),
        (("--lengths", "64"), "the longest of --lengths, 64, is within the training length of 128"),
        (("--factor", 0.5), "factor must be a number of at least 1"),
        (("--window", 129), "window=129 is larger than the training length of 128"),
        (("--lengths", "128,4k"), "that has enough text, 128, is within the training length"),
        (("--lengths", "4k", "--train-length", 4000), "has 3,000 tokens"),
        (("--engine-version", "4.57"), "--engine-version is only for --emit"),
        (("--methods", "ABF", "--factor", 2), "none of --methods takes a factor"),
        (("--dtype", "fp8"), "'fp8' is not one of 'fp32', 'bf16'"),
        (("--text", "nowhere.txt"), "corpus 'nowhere.txt' does not exist"),
        (("--lengths", "4k"), "has no room for 4,096 tokens: give more"),
        (("--lengths", "130", "--train-length", 40), "has no room for the pass key"),
    ],
)
def test_bad_input_is_one_sentence(
    command: Command, model: Path, text: Path, tmp_path: Path, options: Any, said: str
) -> None:
    given = {"--methods": "PI,ReRoPE", "--lengths": "256", "--text": text}
    given |= dict(zip(options[::2], options[1::2], strict=True))
    words = [each for pair in given.items() for each in pair]
    assert said in command("extend", model, *words, "--out", tmp_path / "run").last
    assert not (tmp_path / "run").exists()


def test_lengths_within_training(command: Command, model: Path, text: Path, tmp_path: Path) -> None:
    """They need a factor only where a method has none, and text for the training length."""
    rest = ("--text", text, "--lengths", 64, "--windows", 1, "--no-passkey", "--out", tmp_path)
    command.done("extend", model, "--methods", "YaRN(factor=4),ReRoPE", *rest)
    assert _value(tmp_path, "YaRN(factor=4)", "table", "loss_64") > 0


@pytest.mark.parametrize("given", [("--save", "x"), ("--windows", 3), ("--no-passkey",)])
def test_emit_evaluates_nothing(command: Command, model: Path, given: tuple[object, ...]) -> None:
    said = command("extend", model, "--methods", "YaRN", "--emit", "hf", *given)
    assert "has no effect with --emit" in said.sentence


def test_models_that_cannot_serve(command: Command, text: Path, tmp_path: Path) -> None:
    rest = ("--text", text, "--lengths", "256", "--out", tmp_path / "run")
    scaled = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    scaled["original_max_position_embeddings"] = LENGTH // 2
    _save(tmp_path / "two", rope_parameters=scaled)
    last = command("extend", tmp_path / "two", *rest).last
    assert "max_position_embeddings=" in last
    assert "--train-length" in last
    (tmp_path / "fake.gguf").write_bytes(b"GGML not a model")
    assert "is not a GGUF file" in command("extend", tmp_path / "fake.gguf", *rest).sentence
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "oddity")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    last = command("extend", tmp_path / "odd.gguf", *rest).last
    assert "cannot be loaded by transformers" in last
    assert not (tmp_path / "run").exists()


def test_a_hub_out_of_reach(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    said = command("extend", "some/name")
    assert "some/name cannot be loaded" in said.sentence  # one line: no file is tried again
