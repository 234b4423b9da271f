"""What do the layers and heads of a trained model attend to?

`normattn inspect RUN` measures it: entropy, largest logits, sinks, norms and cosines of every
layer, head and position, while the model reads text held out from its training.
"""

from __future__ import annotations

from normattn.lab.studies.inspect.measured import KIND
from normattn.lab.studies.inspect.page import PAGE
from normattn.lab.sweep.study import Study, measured_by

STUDY = Study(
    name=KIND,
    help="What the layers and heads of a trained model attend to.",
    resolve=measured_by("normattn inspect RUN"),
    cells=(),
    page=PAGE,
    made_by="normattn inspect RUN",
)
