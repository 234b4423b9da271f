"""Training: a generic loop with exact resume, optimisers, schedules, and the causal-LM task."""

from normattn.lab.training.causal import CausalTask, train_causal
from normattn.lab.training.config import TrainingConfig
from normattn.lab.training.loop import train
from normattn.lab.training.loop_config import LoopConfig
from normattn.lab.training.masked import MaskedConfig, MaskedWorkload, train_masked
from normattn.lab.training.optimisers import AdamWConfig, Tiger, TigerConfig
from normattn.lab.training.reports import Callback, StepReport, TrainingResult
from normattn.lab.training.schedules import ScheduleConfig
from normattn.lab.training.task import Task

__all__ = [
    "AdamWConfig",
    "Callback",
    "CausalTask",
    "LoopConfig",
    "MaskedConfig",
    "MaskedWorkload",
    "ScheduleConfig",
    "StepReport",
    "Task",
    "Tiger",
    "TigerConfig",
    "TrainingConfig",
    "TrainingResult",
    "train",
    "train_causal",
    "train_masked",
]
