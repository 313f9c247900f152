"""Checkpoints: find, read safely, recognise the layout, map keys, report."""

from .keys import CheckpointError
from .load import LoadReport, load_model, load_weights

__all__ = ["CheckpointError", "LoadReport", "load_model", "load_weights"]
