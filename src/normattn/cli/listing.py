"""`normattn list`: list and describe the components of a score, residual connections and norms."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape

from normattn.cli.options import List
from normattn.score import ScoreSpec, grammar
from normattn.score.compatibility import combinations, example, needs
from normattn.score.parts import Part, parts
from normattn.score.recipes import RECIPES, recipe
from normattn.terminal import Console

TOKENS, HEADS, HEAD_DIM, LAYERS = 2048, 4, 64, 4
"""The attention shape for which the kernel is shown."""
DEVICES = (("cpu", "float32"), ("cpu", "bfloat16"), ("cuda", "bfloat16"))
MODULES = {
    "model.placement": {
        **{name: name for name in ("PreLN", "PostLN", "DeepNorm", "ReZero", "FixedScale")},
        "ReZeroNoNorm": "ReZero",
        "AttnRes": "AttnRes",
        "nGPT": "NGPT",
    },
    "model.norm": {"rms": "RMSNorm", "layer": "LayerNorm", "dyt": "DyT", "derf": "Derf"},
}
"""The classes in `normattn.layers` of a model's residual connections and norms, by setting."""


def show_components(options: List) -> None:
    """Print every component of a score, or describe those of `options.name`."""
    known, console, name = parts(), Console(highlight=False), options.name
    for setting, modules in MODULES.items():
        if name in modules:
            from normattn.layers import norms, residual

            # What a residual connection or a norm computes is its class's documentation.
            described = inspect.getdoc({**vars(norms), **vars(residual)}[modules[name]])
            record = {"name": name, "setting": setting, "description": described}
            if options.as_json:
                print(json.dumps([record], indent=2, ensure_ascii=False))
            else:
                console.print(f"[bold cyan]{name}[/]  [dim]{setting}[/]")
                console.print(escape(str(described)), soft_wrap=True)
            return
    if name is not None:
        names = {part.name for part, _ in grammar.read(name)[0]}
        known = {key: part for key, part in known.items() if key in names}
        if len(known) > 1:
            ScoreSpec.parse(name)  # Raises where they cannot be combined.
    if options.as_json:
        records = [describe(key, part) for key, part in known.items()]
        print(json.dumps(records, indent=2, ensure_ascii=False))
    elif name is None:
        _show_all(console, known)
    else:
        model = recipe(name)
        if model is not None:
            console.print(f"{escape(name)}: {escape(model)}", soft_wrap=True)
        for key, part in known.items():
            entry = describe(key, part)
            console.print(f"[bold cyan]{key}[/]  [dim]{entry['slot']}, {entry['when']}[/]")
            for line in _lines(entry):
                console.print(f"    {escape(line)}", soft_wrap=True)


def _show_all(console: Console, known: Mapping[str, type[Part]]) -> None:
    width, slot = max(map(len, known)), None
    console.print("A score is s = λ ⟨P N_q(q), P N_k(k)⟩ + b + r, and a name lists its components:")
    console.print("KNA-logn-YaRN is a variant, a logn and a rope scaling.")
    for name, part in known.items():
        if part.slot is not slot:
            slot = part.slot
            console.print(f"[bold underline]{slot}[/]  [dim]{escape(slot.meaning)}[/]")
        line = f"  [bold cyan]{name:<{width}}[/]  {escape(part.summary)}"
        full = not console.is_terminal
        console.print(line, no_wrap=True, soft_wrap=full, overflow=None if full else "ellipsis")
    for title, names in {**MODULES, "models": RECIPES}.items():
        console.print(f"[bold underline]{title}[/]  {', '.join(names)}")
    console.print("normattn list NAME shows the entry of any of these, or of a score.")


def describe(name: str, part: type[Part]) -> dict[str, Any]:
    """Describe a component as JSON values, with an example for L = 512 and factor 8."""
    compatible, spec = combinations(name), example(name)
    instance = next(candidate for candidate in spec.parts if candidate.slot is part.slot)
    return {
        "name": name,
        "slot": str(part.slot),
        "when": part.when,
        "summary": part.summary,
        "equation": part.equation,
        "source": part.source,
        "parameters": [
            {"name": field.name, "default": field.default, "example": getattr(instance, field.name)}
            for field in dataclasses.fields(part)
        ],
        "attention": needs(name),
        "excludes": [{"part": other, "why": why} for other, why in compatible.excludes.items()],
        "beside_rope": list(compatible.beside_rope),
        "kernels": _kernels(spec),
    }


def _kernels(spec: Any) -> dict[str, str]:
    """Return the kernels of a score by device, for all layers if they differ."""
    import torch

    from normattn.layers.explain import explain  # A list of all names needs no layers.

    kernels = {}
    layers = dict.fromkeys(spec.layer(layer, LAYERS) for layer in range(LAYERS))
    for device, dtype in DEVICES:
        # Two query heads for each key head, if a component gates groups of heads.
        shared = 1 if spec.gate is None else HEADS // spec.gate.outputs(HEADS)
        shape, keys = ((1, heads, TOKENS, HEAD_DIM) for heads in (HEADS, HEADS // shared))
        placement = {"dtype": getattr(torch, dtype), "device": device}
        names = [
            explain(layer, shape, keys, causal=not layer.leaks_future, **placement).kernel
            for layer in layers
        ]
        kernels[f"{device} {dtype}"] = ", ".join(dict.fromkeys(names))
    return kernels


def _lines(entry: dict[str, Any]) -> list[str]:
    lines, parameters = [entry["summary"], entry["equation"], entry["source"]], []
    for field in entry["parameters"]:
        name, value = field["name"], field["example"]
        if field["default"] is not None:
            name = f"{name}={field['default']}"
        elif value is None:
            name = f"{name} (optional)"
        elif name != "factor":
            name = f"{name} ({value:.6g} at L = 512 and factor 8)"
        parameters.append(name)
    if parameters:
        lines.append(f"parameters: {', '.join(parameters)}")
    if entry["attention"] != "either":
        lines.append(f"{entry['attention']} attention only")
    for names, why in excluded(entry["excludes"]):
        lines.append(f"not with {', '.join(names)}: {why}")
    if entry["beside_rope"]:
        lines.append(f"only if RoPE is named as well, with: {', '.join(entry['beside_rope'])}")
    by_kernel: dict[str, list[str]] = {}
    for device, kernel in entry["kernels"].items():
        by_kernel.setdefault(kernel, []).append(device)
    run = "; ".join(f"{kernel} ({', '.join(devices)})" for kernel, devices in by_kernel.items())
    return [*lines, f"runs on {run}"]


def excluded(excludes: Sequence[Mapping[str, str]]) -> list[tuple[list[str], str]]:
    """Group the components that another excludes by reason; return them with the reasons.

    A reason loses its prefix "A cannot be combined with B: "; the component's name does not count.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for exclusion in excludes:
        names, _, reason = exclusion["why"].partition(": ")
        reason = reason if "cannot be combined" in names else exclusion["why"]
        other = exclusion["part"]
        groups.setdefault(reason.replace(other, "it"), []).append((other, reason))
    return [([other for other, _ in group], group[0][1]) for group in groups.values()]
