"""`normattn list`: what a score can be made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normattn.score.parts import Part

TOKENS, HEADS, HEAD_DIM, LAYERS = 2048, 4, 64, 4
"""The attention for which a kernel is named."""
PLACES = (("cpu", "float32"), ("cpu", "bfloat16"), ("cuda", "bfloat16"))


def show_parts(name: str | None, as_json: bool) -> None:
    """Print every part of a score, or all that is known of those of `name`."""
    from normattn.score import grammar
    from normattn.score.parts import parts

    known = parts()
    if name is not None:
        named = {part.name for part, _ in grammar.read(name)[0]}
        known = {key: part for key, part in known.items() if key in named}
    if as_json:
        records = [described(key, part) for key, part in known.items()]
        print(json.dumps(records, indent=2, ensure_ascii=False))
    elif name is None:
        _show_all(known)
    else:
        _show(name, [described(key, part) for key, part in known.items()])


def described(name: str, part: type[Part]) -> dict[str, Any]:
    """Everything that is known of a part, for JSON."""
    from normattn.score.compatibility import combinations, needs

    together = combinations()[name]
    return {
        "name": name,
        "slot": str(part.slot),
        "when": part.when,
        "summary": part.summary,
        "equation": part.equation,
        "source": part.source,
        "parameters": _parameters(name, part),
        "attention": needs(name),
        "excludes": [{"part": other, "why": why} for other, why in together.excludes.items()],
        "beside_rope": list(together.beside_rope),
        "kernels": _kernels(name),
    }


def _parameters(name: str, part: type[Part]) -> list[dict[str, Any]]:
    """Fields with their defaults, and what an open one becomes at L = 512 and a factor of 8."""
    import dataclasses

    from normattn.score.compatibility import example

    made = next(candidate for candidate in example(name).parts if candidate.slot is part.slot)
    return [
        {"name": field.name, "default": field.default, "example": getattr(made, field.name)}
        for field in dataclasses.fields(part)
    ]


def _kernels(name: str) -> dict[str, str]:
    """The kernels that serve the smallest score with this part, of all layers where they differ."""
    import torch

    from normattn.layers.explain import explain
    from normattn.score.compatibility import example

    spec, shape, kernels = example(name), (1, HEADS, TOKENS, HEAD_DIM), {}
    layers = dict.fromkeys(spec.layer(layer, LAYERS) for layer in range(LAYERS))
    for device, dtype in PLACES:
        asked = {
            explain(
                layer,
                shape,
                dtype=getattr(torch, dtype),
                device=device,
                causal=not layer.leaks_future,
            ).kernel: None
            for layer in layers
        }
        kernels[f"{device} {dtype}"] = ", ".join(asked)
    return kernels


def _show_all(known: Mapping[str, type[Part]]) -> None:
    """A line a part, by slot, and the models whose scores have a name."""
    from normattn.score.recipes import RECIPES
    from normattn.terminal import Console

    console = Console(highlight=False)
    width, slot = max(map(len, known)), None
    for name, part in known.items():
        if part.slot is not slot:
            slot = part.slot
            console.print(f"[bold underline]{slot}[/]  [dim]{_plain(slot.meaning)}[/]")
        line = f"  [bold cyan]{name:<{width}}[/]  {_plain(part.summary)}"
        console.print(line, no_wrap=True, overflow="ellipsis")
    console.print(f"[bold underline]models[/]  {', '.join(RECIPES)}")
    console.print("normattn list NAME shows the entry of a part, a score or a model.")


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _show(name: str, described: list[dict[str, Any]]) -> None:
    from normattn.score.recipes import recipe
    from normattn.terminal import Console

    console = Console(highlight=False)
    model = recipe(name)
    if model is not None:
        console.print(f"{_plain(name)}: {_plain(model)}", soft_wrap=True)
    for part in described:
        console.print(
            f"[bold cyan]{_plain(part['name'])}[/]  [dim]{part['slot']}, {part['when']}[/]"
        )
        for line in _lines(part):
            console.print(f"    {_plain(line)}", soft_wrap=True)


def _lines(part: dict[str, Any]) -> list[str]:
    """What is said of a part, a line each."""
    lines = [part["summary"], part["equation"], part["source"]]
    if part["parameters"]:
        lines.append("parameters: " + ", ".join(map(_parameter, part["parameters"])))
    if part["attention"] != "either":
        lines.append(f"{part['attention']} attention only")
    for names, why in excluded(part["excludes"]):
        lines.append(f"not with {', '.join(names)}: {why}")
    if part["beside_rope"]:
        lines.append(f"only with RoPE named as well: {', '.join(part['beside_rope'])}")
    by_kernel: dict[str, list[str]] = {}
    for device, kernel in part["kernels"].items():
        by_kernel.setdefault(kernel, []).append(device)
    served = "; ".join(f"{kernel} ({', '.join(places)})" for kernel, places in by_kernel.items())
    return [*lines, f"served by {served}"]


def excluded(excludes: Sequence[Mapping[str, str]]) -> list[tuple[list[str], str]]:
    """The parts that another excludes, those with the same reason together, and the reason.

    Reasons are the same when they differ in the part's name alone; the first one is told.
    """
    groups: dict[str, list[Mapping[str, str]]] = {}
    for exclusion in excludes:
        groups.setdefault(exclusion["why"].replace(exclusion["part"], "it"), []).append(exclusion)
    return [
        ([exclusion["part"] for exclusion in group], group[0]["why"]) for group in groups.values()
    ]


def _parameter(field: dict[str, Any]) -> str:
    """A parameter as a line tells it."""
    if field["default"] is not None:
        return f"{field['name']}={field['default']}"
    if field["example"] is None:
        return f"{field['name']} (open)"
    value = f"{field['example']:.6g}"
    return f"{field['name']} ({value} at L = 512 and factor 8)"
