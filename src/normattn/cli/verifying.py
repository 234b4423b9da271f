"""`normattn verify`: whether an engine was told what was meant."""

from __future__ import annotations

import dataclasses
import json

from normattn.cli.options.verify import VerifyOptions
from normattn.hf.engine_check import verify
from normattn.terminal import show


def verify_told(asked: VerifyOptions) -> int:
    """Print the verdict; 0 where the engine was told what is meant, 1 where not."""
    verdict = verify(asked.model, asked.against, asked.method, train_length=asked.train_length)
    if asked.as_json:
        record = {"equal": verdict.equal, **dataclasses.asdict(verdict)}
        print(json.dumps(record, ensure_ascii=False, indent=2))
    else:
        show(verdict)
    return 0 if verdict.equal else 1
