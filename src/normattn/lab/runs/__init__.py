"""Runs: directory, metrics, checkpoints, recorded environment."""

from normattn.lab.runs.checkpoints import Checkpoint, Checkpoints
from normattn.lab.runs.directory import RunDirectory
from normattn.lab.runs.environment import describe_environment, record_environment
from normattn.lab.runs.metrics import MetricsLog, read_metrics
from normattn.lab.runs.status import RunStatus, check_unchanged, read_status, require_finished

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "MetricsLog",
    "RunDirectory",
    "RunStatus",
    "check_unchanged",
    "describe_environment",
    "read_metrics",
    "read_status",
    "record_environment",
    "require_finished",
]
