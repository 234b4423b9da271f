"""Training: a generic loop with exact resume, optimisers, schedules, and tasks for each model."""

from normattn.lab.training.config import AdamWConfig, LoopConfig, ScheduleConfig, TigerConfig
from normattn.lab.training.loop import train
from normattn.lab.training.task import StepReport, Task, TrainingResult
from normattn.lab.training.tasks.base import train_model
from normattn.lab.training.tasks.text import MaskedConfig, TrainingConfig

__all__ = [
    "AdamWConfig",
    "LoopConfig",
    "MaskedConfig",
    "ScheduleConfig",
    "StepReport",
    "Task",
    "TigerConfig",
    "TrainingConfig",
    "TrainingResult",
    "train",
    "train_model",
]
