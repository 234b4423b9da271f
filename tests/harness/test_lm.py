"""lm-evaluation-harness: models answer as they score by themselves; our tasks can be solved."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import normattn
from cli.conftest import Command
from hostile.foreign import write_model
from normattn import InputError
from normattn.cli.harness import TASKS, NormattnLM
from normattn.cli.harness_tasks import retrieval_documents, segment_documents
from normattn.lab.data.retrieval import TASKS as RETRIEVAL
from normattn.lab.data.tokeniser import Tokeniser
from normattn.models import load_model

TEXTS = ("word1 word2", "word3", "word4 word5 word6 word7 word8 word9")
PAIR = (TEXTS[2], " word1")


@pytest.fixture(scope="module")
def llama(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the run's tokeniser."""
    folder = tmp_path_factory.mktemp("llama")
    sizes: Any = {"vocab_size": 260, "hidden_size": 16, "max_position_embeddings": 8}
    write_model(folder, **sizes, initializer_range=0.5, bos_token_id=0, eos_token_id=0)
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
    auto: Any = transformers.AutoModelForCausalLM
    found = auto.from_pretrained(arguments["pretrained"], dtype=dtype)
    return lambda ids: found(ids).logits


def by_hand(logits: Any, tokens: list[int], scored: int) -> tuple[float, bool]:
    """Log-likelihood of the last `scored` tokens, and whether each is the likeliest."""
    with torch.no_grad():
        known = logits(torch.tensor([tokens]))[0, :-1].double().log_softmax(-1)[-scored:]
    goal = torch.tensor(tokens[-scored:])
    return float(known[range(scored), goal].sum()), bool((known.argmax(-1) == goal).all())


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


@torch.no_grad()
def test_answers_are_greedy_and_end(named: dict[str, Any], run: Path) -> None:
    tokeniser, logits = Tokeniser.load(run / "tokeniser.json"), logits_of(named)
    expected = []
    for text in TEXTS:
        tokens = tokeniser.encode(text)
        first = len(tokens)
        for _ in range(6):
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
    ways: list[dict[str, Any]] = [{"method": "YaRN", "factor": 8}]
    ways.append({"method": "ReRoPE", "window": 4})
    for named in ({"run": str(run)}, {"pretrained": str(llama)}):
        plain = likelihood(PAIR, **named)
        for way in ways:
            assert abs(likelihood(PAIR, **named, **way) - plain) > 1e-5
    for way in ways:
        saved = str(tmp_path / way["method"])
        loaded, tokeniser = normattn.hf.load(llama)
        tokeniser.save_pretrained(saved)
        with normattn.extend(loaded, **way):
            loaded.save_pretrained(saved)
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


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({}, "either run=RUN or pretrained=FOLDER"),
    ({"run": "a", "pretrained": "b"}, "either run=RUN or pretrained=FOLDER"),
    ({"run": "gone"}, "gone"),
    ({"pretrained": "."}, "config.json"),
    ({"runn": 1, "run": "RUN"}, "runn"),
    ({"run": "RUN", "factor": 2}, "factor"),
    ({"run": "RUN", "method": "YaRN", "windw": 2}, "windw"),
    ({"pretrained": "LLAMA", "windw": 2}, "windw"),
    ({"run": "RUN", "method": "YARN"}, "did you mean YaRN"),
    ({"run": "RUN", "method": "YaRN", "factor": 0.5}, "at least 1, but it is 0.5"),
    ({"run": "RUN", "method": "DynamicNTK", "factor": 4}, "takes no factor"),
    ({"run": "RUN", "gguf_file": "x"}, "gguf_file"),
    ({"run": "RUN", "dtype": "int8"}, "dtype is 'int8'"),
    ({"run": "RUN", "max_length": 0}, "max_length is 0"),
]
BAD_METADATA: list[tuple[dict[str, Any], str]] = [
    ({}, "the tasks count tokens"),
    ({"run": "RUN", "length": [64]}, "did you mean 'lengths'"),
    ({"run": "RUN", "lengths": "64,128"}, "lengths"),
    ({"run": "RUN", "lengths": [1, 128]}, "lengths"),
    ({"run": "RUN", "lengths": [96, 100]}, "in whole segments of 48 tokens, got 100"),
    ({"run": "RUN", "samples": 0}, "samples: Input should be greater than or equal to 1, got 0"),
    ({"run": "RUN", "seed": -1}, "seed: Input should be greater than or equal to 0, got -1"),
    ({"run": "RUN", "join": "no"}, "join: "),
    ({"run": "RUN", "text": "gone.txt"}, "'gone.txt' does not exist"),
    ({"tokenizer": "/gone"}, "/gone does not exist"),
]


@pytest.mark.parametrize(
    ("use", "given", "expected"),
    [
        *((lambda given: NormattnLM(**given), *case) for case in BAD_ARGUMENTS),
        *((segment_documents, *case) for case in BAD_METADATA),
    ],
)
def test_what_cannot_be(
    use: Callable[[Any], Any], given: dict[str, Any], expected: str, run: Path, llama: Path
) -> None:
    places = {"RUN": str(run), "LLAMA": str(llama)}
    given = {key: places.get(str(value), value) for key, value in given.items()}
    with pytest.raises(InputError, match=re.escape(expected)):
        use(given)


@pytest.mark.parametrize("task", RETRIEVAL)
def test_retrieval_can_be_solved_from_its_text(run: Path, task: str) -> None:
    """By looking up every asked name among the lines of the text."""
    tokeniser = Tokeniser.load(run / "tokeniser.json")
    documents = retrieval_documents(task, {"run": str(run), "lengths": [96, 160], "samples": 1})
    assert [each["depth"] for each in documents] == [0, 25, 50, 75, 100] * 2
    for each in documents:
        *lines, question = each["context"].split("\n")
        stated = dict(line.split("=") for line in lines if "=" in line)
        for place in range(0, len(each["pieces"]), 2):
            name = question.removesuffix("=")
            assert stated[name].startswith(each["pieces"][place])
            question = "".join(each["pieces"][place + 1 : place + 2]).strip("\n")
        size = len(tokeniser.encode(each["context"] + "".join(each["pieces"])))
        assert each["length"] - 8 <= size <= each["length"] + 8


def test_the_last_segment_stays_the_same(llama: Path, corpus: Path) -> None:
    named = {"pretrained": str(llama), "lengths": [64, 128], "samples": 3, "text": str(corpus)}
    documents = segment_documents(named)
    for one, other in zip(documents[:3], documents[3:], strict=True):
        assert (one["length"], other["length"]) == (64, 128)
        assert one["pieces"] == other["pieces"]
        assert other["context"].endswith(one["context"])
        assert len(other["context"]) > len(one["context"])
    # Longer than any document: only when they are put together.
    with pytest.raises(InputError, match="no document of the test split"):
        segment_documents({**named, "lengths": [4096]})
    assert segment_documents({**named, "lengths": [4096], "join": True, "samples": 1})


def test_the_tasks_run_without_a_network(
    named: dict[str, Any], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    metadata = {**named, "lengths": [96, 192], "samples": 1, "text": str(corpus)}
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
    found = simple_evaluate(
        "normattn", model_args=named, tasks=["normattn"], task_manager=manager, limit=2
    )
    results = found["results"]
    assert results["normattn_passkey"]["acc_96_depth_25,none"] in (0.0, 1.0)
    assert set(results) >= {f"normattn_{task}" for task in RETRIEVAL}
    loss = results["normattn_last_segment"]["loss_96,none"]
    text = "".join(found["samples"]["normattn_last_segment"][0]["arguments"][0])
    tokens = NormattnLM(**named).tok_encode(text)
    scored = by_hand(logits_of({**named, "dtype": "float32"}), tokens, 48)
    assert loss == pytest.approx(-scored[0] / 48, abs=1e-4)


def test_the_command(command: Command, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The harness has thousands of tasks of its own, which it would read first.
    ours = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", ours)
    said = command.done("lm-eval", "--tasks-path")
    assert (Path(said.out.strip()) / "normattn.yaml").is_file()
    assert command("lm-eval").code == 2
    model = ("lm-eval", "--model", "normattn", "--model_args", f"run={run}", "--tasks")
    assert command(*model, "normattn_passky").last == "Tasks not found: normattn_passky"
    metadata = ("--metadata", '{"lengths": [96], "samples": 1}')
    said = command.done(*model, "normattn_last_segment", *metadata)
    assert "loss_96" in said.out
