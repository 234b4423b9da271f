"""`normattn extend`: how far an existing model reads, by which method, at what cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from normattn.cli import values
from normattn.cli.asking import argument, option

EPILOG = """
**Examples**

`normattn extend ./my-model` – a folder of transformers, every method, at its training length and
twice that, on the standard library's source

`normattn extend ./my-model --text book.txt --lengths 8k,16k,32k` – on a text of your own

`normattn extend weights.gguf --methods YaRN,ReRoPE-logn+ --lengths 16k --out runs/gguf` – a GGUF
file, two methods beside the model as it is

`normattn extend ./my-model --methods "YaRN(factor=4),ReRoPE" --window 1024 --lengths 16k --out o` –
parameters of one method in parentheses, those of all by options

`normattn extend ./my-model --methods all --lengths 32k --windows 20 --no-passkey --out o` – more
windows, narrower intervals; the pass key costs as much as the text

`normattn extend ./my-model --text book.txt --lengths 16k --out o --save longer` – and write the
model under the advised method, to be loaded by `normattn.from_pretrained("longer")`

`normattn extend ./my-model --methods "YaRN(factor=4)" --emit vllm` – what vLLM needs to serve it
so; also hf, sglang, llama.cpp, and gguf, which writes a copy of a GGUF file: `--out longer.gguf`

**What is measured**, for the model as it is and under every method

The loss and accuracy of the same last tokens after contexts of every length; loss and accuracy by
position at the longest; what a method costs at the training length; seconds and memory
of a prefill; whether a pass key hidden in the text is found. The end is an advice by length, with
intervals: where they do not tell a method from the model as it is, it says so.

**OUT** gets config.json, measurements of every method, length and window, and the page made of
them: table.md, table.json, a CSV of each table, report.html and figures (`normattn report OUT`
makes it again). What was measured is not measured again: rerun the command to resume after a stop,
with other --methods to add them; another model, text or length needs another directory.

Time grows with the square of the length. After the first window the command says how long the
rest takes.
"""


@dataclass(frozen=True, kw_only=True)
class ExtendOptions:
    """Read texts longer than a trained model was trained on, without training it.

    Tries every method on your own text and says which to take for which length, and what it costs.
    """

    model: str = argument(help="A folder, a GGUF file, or a name on the hub.")
    lengths: str | None = option(
        None,
        help="Lengths to read, in tokens, by commas; 8k is 8192. [default: the training length and "
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
        help="PI, ABF, NTK, NTK-mixed, DynamicNTK, YaRN, ReRoPE, LeakyReRoPE, SelfExtend, each "
        "also with -logn+, by commas; or all.",
    )
    windows: int = option(2, min=1, help="Windows of text, at most.")
    train_length: int | None = option(
        None, min=1, help="How far it was trained to read. [default: its configuration's]"
    )
    factor: float | None = option(
        None,
        help="What PI, NTK, YaRN and their like stretch by. [default: longest of --lengths / "
        "training length]",
    )
    window: int | None = option(
        None, help="Near window of ReRoPE and its like. [default: training length / 4]"
    )
    segment: int | None = option(
        None, help="Last tokens that are scored. [default: shortest length / 8]"
    )
    passkey: bool = option(True, "--passkey/--no-passkey", help="Whether a pass key is hidden.")
    dtype: Literal["fp32", "bf16"] = option("fp32", read=values.dtype, help="fp32 or bf16.")
    device: str = option("auto", help="auto, cpu, cuda or cuda:N.")
    threads: int | None = option(None, min=1, help="CPU threads. [default: as torch chooses]")
    seed: int = option(0, min=0, help="Chooses windows and pass keys.")
    save: Path | None = option(None, help="A new folder for the model under the advised method.")
    save_method: str | None = option(None, help="Save under this one of --methods instead.")
    emit: str | None = option(
        None,
        metavar="ENGINE",
        help="Read no text: print what hf, vllm, sglang, llama.cpp, gguf or mlx needs to serve the "
        "model under the one of --methods, or write it to the new file --out.",
    )
    engine_version: str | None = option(
        None,
        help="The version of --emit's engine, where older ones differ. [default: that which was "
        "checked]",
    )
