"""What every long job shares: its directory, metrics, checkpoints and recorded environment."""

from normattn.lab.runs.checkpoints import Checkpoint, Checkpoints
from normattn.lab.runs.directory import RunDirectory
from normattn.lab.runs.environment import describe_environment, record_environment
from normattn.lab.runs.metrics import MetricsLog, read_metrics
from normattn.lab.runs.status import RunStatus, read_status, require_finished, unchanged

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "MetricsLog",
    "RunDirectory",
    "RunStatus",
    "describe_environment",
    "read_metrics",
    "read_status",
    "record_environment",
    "require_finished",
    "unchanged",
]
