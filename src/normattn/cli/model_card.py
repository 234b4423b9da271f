"""The model card of an exported run: what it is, how it was made, what was measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from normattn import __version__
from normattn.lab.report.markdown import aligned
from normattn.lab.runs import read_metrics
from normattn.lab.training.config import LoopConfig
from normattn.models.flops import parameter_count

_MODEL_FIELDS = ("score", "layers", "dim", "heads", "kv_heads", "block", "placement", "norm")
_TRAINING_FIELDS = ("steps", "batch_size", "precision", "seed")
_CARD = """---
{data}
---

# {name}

{kind} of normattn with the attention score `{score}`: {parameters:,} parameters,
trained to read {length} tokens. Corpus: `{corpus}`.

## Use

```python
import normattn.hf  # pip install 'normattn[hf]': makes the model known
from transformers import {imports}

model = {auto}.from_pretrained("{name}")
{tokeniser}```

## Training

{settings}

{steps:,} steps. {final}Exported by normattn {version}.

![Training loss by step](figures/training_loss.png)

{evaluation}## Licence

{licence}
"""


def card_text(
    name: str,
    run: Path,
    config: LoopConfig,
    model: nn.Module,
    task: str,
    auto: str,
    tokeniser: bool,
    table: str | None,
    licence: str | None,
) -> str:
    """README.md of an exported model; the same run gives the same text.

    `task` and `auto` are transformers' names of what the model does and of its Auto class; `table`
    is the report's, None where nothing was evaluated.
    """
    from huggingface_hub import ModelCardData  # It comes with transformers.

    shape: Any = config.model  # type: ignore[attr-defined]
    corpus = str(config.data.corpus)  # type: ignore[attr-defined]
    return _CARD.format(
        data=ModelCardData(
            license=licence, library_name="transformers", pipeline_tag=task, tags=["normattn"]
        ).to_yaml(),
        name=name,
        kind=type(model).__name__,
        score=shape.score.name,
        parameters=parameter_count(model),
        length=shape.train_length,
        # The last part of a path: where it lay on one machine tells nobody anything.
        corpus=Path(corpus).name if "/" in corpus and ":" not in corpus else corpus,
        imports=auto + ", AutoTokenizer" * tokeniser,
        auto=auto,
        tokeniser=f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n' * tokeniser,
        settings=_settings(config),
        steps=config.steps,
        final=_final(run),
        version=__version__,
        evaluation="" if table is None else f"## Evaluation\n\n{_evaluation(table)}\n\n",
        licence="Not stated."
        if licence is None
        else f"{licence}, as stated by who made the model.",
    )


def _settings(config: LoopConfig) -> str:
    fields = config.model_dump(mode="json")
    rows = [(name, fields["model"].get(name)) for name in _MODEL_FIELDS]
    rows += [(name, fields.get(name)) for name in _TRAINING_FIELDS]
    rows += [
        (name, ", ".join(f"{key} {value}" for key, value in fields[name].items() if value))
        for name in ("optimiser", "schedule")
    ]
    return aligned(
        ["setting", "value"], [[n, str(value)] for n, value in rows if value is not None]
    )


def _final(run: Path) -> str:
    """How the training ended."""
    lines = read_metrics(run / "metrics.jsonl")
    if not lines:
        return ""
    last = lines[-1]
    return f"Loss {last['loss']:.4f} at step {last['step']:,}, on its own batch. "


def _evaluation(table: str) -> str:
    """The report's table under a heading of the card, and where its figures are."""
    body = re.sub(r"^# .*\n+", "", table, count=1)
    body = re.sub(r"^(#+) ", r"#\1 ", body, flags=re.MULTILINE).strip()
    body = re.sub(r"\]\((?!https?:)", "](evaluation/", body)
    return f"{body}\n\nThe numbers and figures are in [evaluation](evaluation)."
