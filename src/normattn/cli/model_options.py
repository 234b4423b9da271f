"""The options of commands on models of transformers, with their help; quick to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from normattn.cli.parsing import argument, flag, option, token_counts


@dataclass(frozen=True, kw_only=True)
class Extend:
    """Evaluate a trained model on texts longer than it was trained on, without training it.

    Tries every method on your own text. Says which to take for which length, and what it costs.
    """

    epilog: ClassVar[str] = """
**Examples**

`normattn extend ./my-model` – a folder of transformers, every method, at its training length and
twice that, on the standard library's source

`normattn extend ./my-model --text book.txt --lengths 8k,16k,32k` – on your own text

`normattn extend weights.gguf --methods YaRN,ReRoPE-logn+ --lengths 16k --out runs/gguf` – a GGUF
file, two methods and the unmodified model

`normattn extend ./my-model --methods "YaRN(factor=4),ReRoPE" --window 1024 --lengths 16k --out o` –
parameters of one method in parentheses, those of all by options

`normattn extend ./my-model --methods all --lengths 32k --windows 20 --no-passkey --out o` – more
windows, narrower intervals; the pass key takes as long as the text

`normattn extend ./my-model --text book.txt --lengths 16k --out o --save longer` – and write the
model under the recommended method, to be loaded by `normattn.from_pretrained("longer")`

`normattn extend ./my-model --methods "YaRN(factor=4)" --emit vllm` – what vLLM needs to serve it
so; also hf, sglang, llama.cpp, mlx, and gguf, which writes a copy of a GGUF file:
`--out longer.gguf`

**Measured**, for the unmodified model and every method: loss and accuracy of the same last tokens
after contexts of every length, loss and accuracy by position, the cost at the training length,
seconds and memory of a prefill, and whether a pass key in the text is found.

**OUT** gets config.json, the measurements and the page: table.md, table.json, a CSV of each table,
report.html and figures. What was measured is not measured again: rerun the command to resume, with
other --methods to add them. Another model, text or length needs another directory.

Time grows with the square of the length. After the first window the command says how long the
rest takes.
"""

    model: str = argument(help="A folder, a GGUF file, or a name on the hub.")
    lengths: tuple[int, ...] | None = option(
        None,
        read=token_counts,
        help="Lengths, in tokens, by commas; 8k is 8192. [default: the training length and "
        "twice that]",
    )
    out: Path | None = option(
        None,
        help="The directory of measurements, tables and figures. [default: runs/extend-MODEL]",
    )
    gguf: str | None = option(None, help="The GGUF file in the folder or in the hub's repository.")
    text: list[str] | None = option(
        None,
        metavar="FILE",
        help="A file or a folder of text; may be given more than once. [default: the standard "
        "library's own source]",
    )
    methods: str = option(
        "all",
        help="PI, ABF, NTK, NTK-mixed, DynamicNTK, YaRN, ReRoPE, LeakyReRoPE, SelfExtend, logn+, "
        "DualChunk, also with -logn+, by commas; all: those but DualChunk, and five with -logn+.",
    )
    windows: int = option(2, min=1, help="Windows of text, at most.")
    train_length: int | None = option(
        None, min=1, help="Its training length. [default: its configuration's]"
    )
    factor: float | None = option(
        None,
        help="Factor of PI, NTK, YaRN and similar methods. [default: longest of --lengths / "
        "training length]",
    )
    window: int | None = option(
        None, help="Near window of ReRoPE and similar methods. [default: training length / 4]"
    )
    segment: int | None = option(
        None, help="Last tokens that are scored. [default: shortest length / 8]"
    )
    passkey: bool = option(
        True, "--passkey/--no-passkey", help="Whether a pass key is hidden in the text."
    )
    dtype: Literal["fp32", "bf16"] = option("fp32", help="Type of the weights.")
    device: str = option("auto", help="auto, cpu, cuda or cuda:N.")
    threads: int | None = option(None, min=1, help="CPU threads. [default: as torch chooses]")
    seed: int = option(0, min=0, help="Chooses windows and pass keys.")
    save: Path | None = option(
        None, help="A new folder for the model under the recommended method."
    )
    save_method: str | None = option(None, help="Save under this one of --methods instead.")
    emit: str | None = option(
        None,
        metavar="ENGINE",
        help="Evaluate nothing: print what hf, vllm, sglang, llama.cpp, gguf or mlx needs to serve "
        "the model under the one of --methods, or write it to the new file --out.",
    )
    engine_version: str | None = option(
        None,
        help="The version of --emit's engine, where older ones differ. [default: that which was "
        "checked]",
    )


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Compare an engine's settings of a model's positions with what is meant."""

    epilog: ClassVar[str] = """
**Examples**

`normattn verify ./extended --against /srv/model/config.json` – a model that
`normattn extend --save` wrote, and what is served

`normattn verify ./my-model --method "YaRN(factor=4)" --against overrides.json` – fields as for
vLLM's `--hf-overrides`, on top of the model's own

`normattn verify ./my-model --method "YaRN(factor=4)" --against serve.sh` – flags of vLLM, SGLang or
llama.cpp; also a GGUF file

**Exit code**: 0 where inverse frequencies, attention factor and lengths are as meant, 1 where they
are not, 2 for bad input. The usual mistakes are named, a sentence each.
"""

    model: str = argument(help="What is meant: a folder, a GGUF file, a config.json, a hub name.")
    against: str = option(
        help="The engine's settings: a config.json or its folder, a JSON of some fields, a GGUF "
        "file, or a text with the engine's flags."
    )
    method: str | None = option(
        None, help="The method that is meant. [default: the one that MODEL was saved under]"
    )
    train_length: int | None = option(
        None, min=1, help="Its training length. [default: its configuration's]"
    )
    as_json: bool = flag("--json", "Print a record as JSON instead of lines.")


@dataclass(frozen=True, kw_only=True)
class Score:
    """Name the attention score of every layer of a transformers model, and check the name."""

    epilog: ClassVar[str] = """
**Examples**

`normattn score ./my-model` – the score of every layer, as a name that `--score` and
`ScoreSpec.parse` take

`normattn score model.gguf`, `normattn score config.json`, `normattn score Qwen/Qwen3-8B`

`normattn score ./my-model --json` – for a program to read

**Method**: a small random model of the configuration reads a few tokens. Normalisation, rotation,
scale, window, cap, sink and gate are fitted to what its layers do. `normattn.attention` with the
score so found is compared with each layer's own attention.

**Exit code**: 0 where the score of every layer is verified, 1 where one is not, 2 for bad input.
"""

    model: str = argument(help="A folder, a GGUF file, a config.json or a name on the hub.")
    tokens: int = option(48, min=8, max=4096, help="Tokens that the layers read.")
    as_json: bool = flag("--json", "Print a record as JSON instead of lines.")


@dataclass(frozen=True, kw_only=True)
class LmEval:
    """Evaluate by lm-evaluation-harness; every argument is one of its own command `lm_eval`.

    The harness needs `pip install normattn[lm-eval]`. Its model `normattn` is a run trained here
    (`run=RUN`) or a model of transformers (`pretrained=FOLDER`), extended by `method=`. Its tasks
    `normattn` need no download; your own `--include_path` replaces them.
    """

    epilog: ClassVar[str] = """
**Examples**

`normattn lm-eval --model normattn --model_args run=runs/kna --tasks normattn` – a run, on
normattn's tasks

`normattn lm-eval --model normattn --model_args pretrained=FOLDER,method=YaRN,factor=2 --tasks
normattn_passkey --metadata '{"lengths": [8192, 16384], "samples": 5}'` – an extended model

`normattn lm-eval ls tasks` – every task that the harness knows

`normattn lm-eval --tasks-path` – the folder of normattn's tasks, for `lm_eval --include_path`
"""

    arguments: list[str] | None = argument(None, help="Arguments of `lm_eval`.", show_default=False)
    tasks_path: bool = flag("--tasks-path", "Print the folder of normattn's tasks, and exit.")
