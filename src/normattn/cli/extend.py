"""`normattn extend`: how far an existing model reads, by which method, at what cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normattn.errors import InputError

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

Time grows with the square of the length: begin with one window and few methods.
"""


def command(
    model: Annotated[str, typer.Argument(help="A folder, a GGUF file, or a name on the hub.")],
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Lengths to read, in tokens, by commas; 8k is 8192. [default: the training length "
            "and twice that]"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The directory of measurements, tables and figures. [default: runs/extend-MODEL]"
        ),
    ] = None,
    gguf: Annotated[
        str | None, typer.Option(help="The GGUF file in the folder or in the hub's repository.")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="A file or a folder of text; may be given more than once. [default: the standard "
            "library's own source]",
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="PI, ABF, NTK, NTK-mixed, DynamicNTK, YaRN, ReRoPE, LeakyReRoPE, SelfExtend, each "
            "also with -logn+, by commas; or all."
        ),
    ] = "all",
    windows: Annotated[int, typer.Option(min=1, help="Windows of text, at most.")] = 2,
    train_length: Annotated[
        int | None,
        typer.Option(min=1, help="How far it was trained to read. [default: its configuration's]"),
    ] = None,
    factor: Annotated[
        float | None,
        typer.Option(
            help="What PI, NTK, YaRN and their like stretch by. [default: longest of --lengths / "
            "training length]"
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Near window of ReRoPE and its like. [default: training length / 4]"),
    ] = None,
    segment: Annotated[
        int | None,
        typer.Option(help="Last tokens that are scored. [default: shortest length / 8]"),
    ] = None,
    passkey: Annotated[
        bool, typer.Option("--passkey/--no-passkey", help="Whether a pass key is hidden.")
    ] = True,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. [default: as torch chooses]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Chooses windows and pass keys.")] = 0,
    save: Annotated[
        Path | None, typer.Option(help="A new folder for the model under the advised method.")
    ] = None,
    save_method: Annotated[
        str | None, typer.Option(help="Save under this one of --methods instead.")
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE",
            help="Read no text: print what hf, vllm, sglang, llama.cpp or gguf needs to serve the "
            "model under the one of --methods, or write it to the new file --out.",
        ),
    ] = None,
) -> None:
    """Read texts longer than a trained model was trained on, without training it.

    Tries every method on your own text and says which to take for which length, and what it costs.
    """
    if dtype not in ("fp32", "bf16"):
        raise InputError(f"--dtype is fp32 or bf16, not {dtype!r}")
    if emit is not None:
        from normattn.commands.emitting import emit_method

        emit_method(model, gguf, emit, methods, lengths, train_length, factor, window, out)
        return
    import torch

    from normattn.commands.extending import Asked, extend_model

    if threads is not None:
        torch.set_num_threads(threads)
    asked = Asked(
        model=model,
        gguf=gguf,
        text=tuple(text) if text else None,
        methods=methods,
        lengths=lengths,
        train_length=train_length,
        factor=factor,
        window=window,
        segment=segment,
        windows=windows,
        passkey=passkey,
        dtype="bf16" if dtype == "bf16" else "fp32",
        device=device,
        seed=seed,
        save=save,
        save_method=save_method,
    )
    name = Path(gguf or model).name.removesuffix(".gguf")
    extend_model(asked, out or Path("runs") / f"extend-{name}")
