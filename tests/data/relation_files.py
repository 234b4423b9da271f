"""Small relation data that the tests write by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAMES = ("train_triples.json", "dev_triples.json", "test_triples.json")


def item(text: str, *relations: str) -> dict[str, Any]:
    """One document in the NYT24 form."""
    triples = [["someone", relation, "something"] for relation in relations]
    return {"text": text, "triple_list": triples}


def write_json(path: Path, value: Any) -> None:
    """Write `value` where it may have no folder yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_relations(folder: Path, names: tuple[str, ...] = NAMES, count: int = 8) -> Path:
    """Three splits whose labels can be read off the words; `unseen` occurs in the test alone."""
    people, places = ("Ada", "Kurt", "Emmy", "Alan"), ("London", "Rome")
    for number, name in enumerate(names):
        items = []
        for i in range(count if number == 0 else count // 2):
            who, where = people[i % 4], places[i % 2]
            if i % 2:
                items.append(item(f"{who} was born in {where} , number {i} {number} .", "born"))
            else:
                said = f"{who} lived near {where} and was born there , {i} {number} ."
                items.append(item(said, "born", "lived"))
        if number == 2:
            items.append(item("Nobody has seen this .", "unseen"))
        if name.endswith(".jsonl"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
        else:
            write_json(folder / name, items)
    return folder
