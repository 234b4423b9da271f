"""Trainings of each kind of model: its settings, its data and its loss."""
