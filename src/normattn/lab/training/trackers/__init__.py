"""Trackers: where the curves of a training can be watched and compared (the extra `track`)."""

from normattn.lab.training.trackers.tracking import TRACKERS, TrackerName, Tracking

__all__ = ["TRACKERS", "TrackerName", "Tracking"]
