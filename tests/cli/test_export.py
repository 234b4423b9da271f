"""`normattn export`: a run as a folder of transformers, and what it refuses in one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import normattn.hf  # noqa: F401 (makes our models known)
from data.helpers import write_relations
from normattn.cli.export import export_run
from normattn.cli.options import Export
from normattn.errors import InputError
from normattn.lab.data.relations import prepare_relations
from normattn.lab.data.tokeniser import SEPARATOR, Tokeniser
from normattn.lab.training import train_model
from normattn.lab.training.tasks.classification import ClassificationConfig
from normattn.lab.training.tasks.text import MaskedConfig
from normattn.models import MaskedLM, load_model
from normattn.models.pretrained import load_any, load_as
from studies.conftest import Command

TEXTS = ["word1 word2", f"  {SEPARATOR} it's\t\r\n ! é 😀 中文", ""]


def test_other_lengths_stay_out_of_the_card(command: Command, run: Path, tmp_path: Path) -> None:
    for multiples in ("1,2", "1,4"):
        command.done("evaluate", run, "--multiples", multiples, "--max-windows", 2)
    said = command.done("export", run, tmp_path / "out")
    assert "the model card has no evaluation" in said.err
    assert "evaluated with other last segments" in said.err
    assert "## Evaluation" not in (tmp_path / "out" / "README.md").read_text("utf-8")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_model_tokeniser_and_card(command: Command, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "kna"
    command.done("evaluate", run, "--multiples", "1,2", "--max-windows", 2)
    said = command.done("export", run, out, "--license", "apache-2.0")
    assert "AutoModelForCausalLM" in said.out
    ours, loaded = load_model(run / "model").eval(), AutoModelForCausalLM.from_pretrained(out)
    ids = torch.randint(0, 260, (2, 11))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, ours(ids))
    tokeniser, mine = AutoTokenizer.from_pretrained(out), Tokeniser.load(run / "tokeniser.json")
    for text in TEXTS:
        assert tokeniser(text)["input_ids"] == mine.encode(text)
        assert tokeniser.decode(mine.encode(text)) == text
    assert tokeniser.decode([0]) == SEPARATOR
    card = (out / "README.md").read_text("utf-8")
    data = vars(huggingface_hub.ModelCard(card).data)
    assert (data["license"], data["library_name"]) == ("apache-2.0", "transformers")
    for needed in ("KNA", "4 steps", "training length 8 tokens", "## Evaluation", "apache-2.0"):
        assert needed in card
    assert str(tmp_path.parent) not in card
    linked = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", card)
    assert len(linked) >= 2
    there = (*linked, "figures/training_loss.png", "evaluation/table.md")
    assert all((out / target).exists() for target in there)


def test_it_generates_like_the_command(command: Command, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "kna"
    command.done("export", trained, out)
    assert "Not stated" in (out / "README.md").read_text("utf-8")
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    tokeniser: Any = AutoTokenizer.from_pretrained(out)
    prompts = ["word1 word2", "word3"]
    batch = tokeniser(prompts, return_tensors="pt", padding=True)
    found = model.generate(**batch, max_new_tokens=6, do_sample=False)
    for prompt, row in zip(prompts, found[:, batch["input_ids"].shape[1] :], strict=True):
        said = command("generate", trained, "--prompt", prompt, "--max-new-tokens", 6)
        assert tokeniser.decode(row, skip_special_tokens=True) + "\n" == said.out


LOOP: dict[str, Any] = {"schedule": {"warmup_steps": 1}, "steps": 1, "batch_size": 2, "threads": 1}
MODEL = {"dim": 16, "layers": 1, "heads": 2}


def exported(config: Any, folder: Path) -> Path:
    """A short training run, with its export in the same folder."""
    train_model(config, folder / "run", show_progress=False)
    export_run(Export(run=folder / "run", out=folder / "out"))
    return folder / "run"


def test_a_masked_model_has_its_mask(corpus: Path, tmp_path: Path) -> None:
    data = {"corpus": str(corpus), "vocab_size": 260}
    model = {**MODEL, "train_length": 8}
    run = exported(MaskedConfig.parse({**LOOP, "model": model, "data": data}), tmp_path)
    tokeniser, ours = Tokeniser.load(run / "tokeniser.json"), load_as(MaskedLM, run / "model")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.mask_token_id == ours.config.mask_id
    ids = theirs("word1 <|mask|>", return_tensors="pt")
    assert int(ids["input_ids"][0, -1]) == ours.config.mask_id
    assert theirs("word1 word2 é")["input_ids"] == tokeniser.encode("word1 word2 é")
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded(**ids).logits, ours.eval()(ids["input_ids"]))


def test_a_classifier_reads_texts_as_in_training(tmp_path: Path) -> None:
    corpus = str(write_relations(tmp_path / "relations"))
    data = {"corpus": corpus, "vocab_size": 400, "max_tokens": 8}
    fields = {**LOOP, "model": {**MODEL, "labels": 3}, "data": data}
    config = ClassificationConfig.parse(fields)
    run = exported(config, tmp_path)
    encode = prepare_relations(config.data).tokeniser.encode
    tokeniser: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = ["for line in Lines: open(line)", "[PAD] é 中文 \t x", "a " * 20]
    found = [tokeniser(text)["input_ids"] for text in texts]
    assert found == encode(texts)
    batch = tokeniser(texts, padding=True, truncation=True, return_tensors="pt")
    assert batch["input_ids"].shape[1] == 8
    ours = load_any(run / "model").eval()
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        found = theirs(**batch).logits
        expected = [ours(torch.tensor([ids[:8]]))[0] for ids in encode(texts)]
    torch.testing.assert_close(found, torch.stack(expected))
    assert [*theirs.config.id2label.values()] == ["born", "lived", "unseen"]
    (run / "vocab.txt").unlink()
    with pytest.raises(InputError, match=r"vocab\.txt"):
        export_run(Export(run=run, out=tmp_path / "again"))


def test_places_are_refused(command: Command, trained: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert "is not empty" in command("export", trained, tmp_path / "full").sentence
    assert "is a file" in command("export", trained, tmp_path / "full" / "mine").sentence
    assert "not a run directory" in command("export", tmp_path / "full", tmp_path / "x").sentence
    (tmp_path / "full" / "config.json").write_text('{"model_type": "normattn"}')
    assert "model of transformers" in command("export", tmp_path / "full", tmp_path / "x").sentence
    (run / "model" / "model.safetensors").write_bytes(b"x")
    assert "is damaged" in command("export", run, tmp_path / "x").sentence
    assert sorted(each.name for each in tmp_path.iterdir()) == ["full", "runs"]
