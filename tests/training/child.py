"""Train the toy in a process of its own: `python -m training.child OUT JSON`; a line per step."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from normattn.errors import Interrupted, NormattnError
from normattn.lab.training.task import StepReport

from .toy import ToyTask, run


def main() -> int:
    out, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    dropout, pause = options.pop("dropout", 0.0), options.pop("pause", 0.0)

    def on_step(report: StepReport) -> None:
        print(report.step, flush=True)
        time.sleep(pause)

    try:
        run(out, None, lambda world: ToyTask(world, dropout), {"on_step": on_step}, **options)
    except Interrupted as error:
        print(error, file=sys.stderr)
        return 130
    except NormattnError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
