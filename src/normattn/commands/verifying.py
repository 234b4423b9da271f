"""`normattn verify`: whether an engine was told what was meant."""

from __future__ import annotations

import dataclasses
import json

from normattn.hf.verify import verify


def verify_told(
    folder: str, against: str, method: str | None, train_length: int | None, as_json: bool
) -> int:
    """Print the verdict; 0 where the engine was told what is meant, 1 where not."""
    verdict = verify(folder, against, method, train_length=train_length)
    if as_json:
        record = {"equal": verdict.equal, **dataclasses.asdict(verdict)}
        print(json.dumps(record, ensure_ascii=False, indent=2))
    else:
        print(verdict)
    return 0 if verdict.equal else 1
