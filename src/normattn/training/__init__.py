"""Training: a generic loop with exact resume, optimisers, schedules, and the causal-LM task."""

from normattn.training.causal import CausalTask, train_causal
from normattn.training.config import TrainingConfig
from normattn.training.loop import train
from normattn.training.loop_config import LoopConfig
from normattn.training.masked import MaskedConfig, MaskedWorkload, train_masked
from normattn.training.optimisers import AdamWConfig, Tiger, TigerConfig
from normattn.training.reports import Callback, StepReport, TrainingResult
from normattn.training.schedules import ScheduleConfig
from normattn.training.task import Task

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
