"""Training: a generic loop with exact resume, optimisers, schedules, and the causal-LM task."""
