"""lm-evaluation-harness: our models answer as they score by themselves, our tasks are solvable."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import normattn
from normattn import InputError
from normattn.cli.app import main
from normattn.commands import harness_text
from normattn.commands.harness import NormattnLM
from normattn.commands.harness_command import TASKS
from normattn.commands.harness_tasks import ManyShot
from normattn.commands.harness_text import (
    many_shot_documents,
    retrieval_documents,
    segment_documents,
)
from normattn.data.corpora import Document
from normattn.data.retrieval_facts import TASKS as RETRIEVAL
from normattn.data.splits import split_of
from normattn.data.tokeniser import Tokeniser
from normattn.models import load_model

PRESET = """
summary = "for tests"
[training]
steps = 3
batch_size = 4
[training.model]
dim = 16
layers = 1
heads = 2
train_length = 8
[training.data]
corpus = "{corpus}"
vocab_size = 280
test_fraction = 0.4
[training.schedule]
warmup_steps = 1
[evaluation]
multiples = [1]
"""
TEXTS = ("word1 word2", "word3", "word4 word5 word6 word7 word8 word9")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that learned nothing."""
    folder = tmp_path_factory.mktemp("harness")
    texts = folder / "texts"
    texts.mkdir()
    for n in range(8):
        words = "\n".join(f"word{(n * 7 + i * i) % 50}" for i in range(150))
        (texts / f"text{n:02}.txt").write_text(words)
    (folder / "tiny.toml").write_text(PRESET.format(corpus=texts))
    out = folder / "run"
    with pytest.raises(SystemExit) as ended:
        main(["train", "--preset", str(folder / "tiny.toml"), "--score", "KNA", "--out", str(out)])
    assert ended.value.code == 0
    return out


@pytest.fixture(scope="module")
def llama(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the run's tokeniser."""
    import transformers

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        vocab_size=280,
        num_attention_heads=2,
        max_position_embeddings=8,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=0,
        **sizes,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    file = str(run / "tokeniser.json")
    made: Any = transformers.PreTrainedTokenizerFast
    made(tokenizer_file=file, eos_token="<|doc|>").save_pretrained(folder)
    return folder


def logits_of(arguments: dict[str, Any]) -> Any:
    """The bare model that the arguments name, in float64 unless they say otherwise."""
    dtype = getattr(torch, arguments.get("dtype", "float64"))
    if "run" in arguments:
        model = load_model(Path(arguments["run"]) / "model").to(dtype).eval()
        return lambda ids: model(ids)
    from transformers import LlamaForCausalLM

    found: Any = LlamaForCausalLM.from_pretrained(arguments["pretrained"], dtype=dtype)
    return lambda ids: found(ids).logits


def by_hand(logits: Any, tokens: list[int], scored: int) -> tuple[float, bool]:
    """Log-likelihood of the last `scored` tokens, and whether each is the likeliest."""
    with torch.no_grad():
        known = logits(torch.tensor([tokens]))[0, :-1].double().log_softmax(-1)[-scored:]
    goal = torch.tensor(tokens[-scored:])
    return float(known[range(scored), goal].sum()), bool((known.argmax(-1) == goal).all())


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


@pytest.fixture(params=["run", "pretrained"])
def named(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The model arguments of each kind of model."""
    folder = request.getfixturevalue("run" if request.param == "run" else "llama")
    return {request.param: str(folder)}


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


@pytest.fixture
def relations(tmp_path: Path) -> Path:
    """A folder of relations: `a` of even numbers, `b` of odd ones."""
    for name, count in (("train", 40), ("dev", 4), ("test", 10)):
        lines = [
            json.dumps({"text": f"word{n} {name}", "triple_list": [["x", "ab"[n % 2], "y"]]})
            for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_many_shot_can_be_solved_from_its_text(run: Path, relations: Path) -> None:
    """By the parity that the shots show; right answers count, others do not."""
    told = {"run": str(run), "lengths": [96, 192], "samples": 4}
    documents = many_shot_documents({**told, "relations": str(relations), "labels": 2})
    assert [each["length"] for each in documents] == [96] * 4 + [192] * 4
    scored = ManyShot.process_results
    for each in documents:
        *shots, question = each["context"].split("\n\n")
        assert each["shots"] == len(shots)
        shown = {int(shot[4:].split()[0]) % 2: shot.split("=>")[1] for shot in shots}
        assert set(shown.values()) == {" a", " b"}
        answer = shown[int(question[4:].split()[0]) % 2] + "\n"
        assert each["pieces"][each["right"]] == answer
        knows = [(0.0 if piece == answer else -9.0, piece == answer) for piece in each["pieces"]]
        length = each["length"]
        right = scored(None, each, knows)  # type: ignore[arg-type]
        assert (right[f"acc_{length}"], right[f"exact_{length}"]) == (1, 1)
        assert right[f"shots_{length}"] == len(shots)
        wrong = scored(None, each, knows[::-1])  # type: ignore[arg-type]
        assert (wrong["acc"], wrong["exact"]) == (0, 0)
        unsure = scored(None, each, [(-1.0, False)] * 2)  # type: ignore[arg-type]
        assert (unsure["acc"], unsure["exact"]) == (0.5, 0)


def test_own_text_is_held_out_as_the_run_divided_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [Document(f"{g}/{n}", f"file {n} of {g}", str(g)) for g in range(30) for n in range(3)]
    corpus = SimpleNamespace(documents=lambda most: files)
    monkeypatch.setattr(harness_text, "parse_corpus", lambda address: corpus)
    share = (0, 0.3, 0.1)
    tokeniser = Tokeniser.load(run / "tokeniser.json")
    tested = vars(harness_text)["_tokens"](tokeniser, "grouped", None, share, join=False).test
    groups = [str(g) for g in range(30) if split_of(str(g), *share) == "test"]
    assert 3 <= len(groups) <= 20
    assert tested.names == [f"{g}/{n}" for g in groups for n in range(3)]


def test_the_last_segment_stays_the_same(llama: Path, run: Path) -> None:
    text = str(run.parent / "texts")
    named = {"pretrained": str(llama), "lengths": [64, 128], "samples": 3, "text": text}
    documents = segment_documents(named)
    short, long = documents[:3], documents[3:]
    for one, other in zip(short, long, strict=True):
        assert (one["length"], other["length"]) == (64, 128)
        assert one["pieces"] == other["pieces"]
        assert other["context"].endswith(one["context"])
        assert len(other["context"]) > len(one["context"])
    # Longer than any document: only when they are put together.
    with pytest.raises(InputError, match="no document of the test split"):
        segment_documents({**named, "lengths": [2048]})
    assert segment_documents({**named, "lengths": [2048], "join": True, "samples": 1})


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, "the tasks count tokens"),
        ({"run": "RUN", "length": [64]}, "did you mean 'lengths'"),
        ({"run": "RUN", "lengths": "64,128"}, "expected numbers of tokens"),
        ({"run": "RUN", "lengths": [96, 100]}, "in whole segments of 48 tokens, got 100"),
        ({"run": "RUN", "samples": 0}, "samples is 0"),
        ({"run": "RUN", "labels": 1}, "labels is 1; expected a number of at least 2"),
        ({"run": "RUN", "seed": -1}, "seed is -1"),
        ({"run": "RUN", "join": "no"}, "join is 'no'"),
        ({"run": "RUN", "text": "gone.txt"}, "'gone.txt' does not exist"),
        ({"tokenizer": "/gone"}, "tokeniser of /gone cannot be loaded"),
    ],
)
def test_metadata_that_cannot_be(run: Path, metadata: dict[str, Any], expected: str) -> None:
    given = {key: str(run) if value == "RUN" else value for key, value in metadata.items()}
    with pytest.raises(InputError, match=re.escape(expected)):
        segment_documents(given)


def test_the_tasks_run_without_a_network(
    named: dict[str, Any], run: Path, relations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = {"lengths": [96, 192], "samples": 1, "text": str(run.parent / "texts")}
    settings |= {"relations": str(relations), "labels": 2}
    manager = TaskManager(
        include_path=str(TASKS), include_defaults=False, metadata={**named, **settings}
    )
    found = simple_evaluate(
        "normattn", model_args=named, tasks=["normattn"], task_manager=manager, limit=2
    )
    results = found["results"]
    assert results["normattn_passkey"]["acc_96_depth_25,none"] in (0.0, 1.0)
    assert set(results) >= {f"normattn_{task}" for task in RETRIEVAL}
    many = results["normattn_many_shot"]
    assert many["acc_96,none"] in (0, 0.5, 1)
    assert many["shots_192,none"] > many["shots_96,none"] >= 2
    loss = results["normattn_last_segment"]["loss_96,none"]
    samples = found["samples"]["normattn_last_segment"]
    scored = by_hand(
        logits_of({**named, "dtype": "float32"}),
        NormattnLM(**named).tok_encode("".join(samples[0]["arguments"][0])),
        48,
    )
    assert loss == pytest.approx(-scored[0] / 48, abs=1e-4)


def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["lm-eval", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code, *capfd.readouterr()


def test_the_command(
    capfd: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The harness has thousands of tasks of its own, which it would read first.
    ours = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", ours)
    code, out, _ = said(capfd, "--tasks-path")
    assert code == 0
    assert (Path(out.strip()) / "normattn.yaml").is_file()
    assert said(capfd)[0] == 2
    model = ("--model", "normattn", "--model_args", f"run={run}")
    code, _, err = said(capfd, *model, "--tasks", "normattn_passky")
    assert (code, err.splitlines()[-1]) == (2, "normattn: Tasks not found: normattn_passky")
    metadata = ("--metadata", '{"lengths": [96], "samples": 1}')
    code, out, _ = said(capfd, *model, "--tasks", "normattn_last_segment", *metadata)
    assert code == 0
    assert "loss_96" in out
