"""Figures of the pages that are not yet values."""
