"""Checkpoints: find, read safely, recognise the layout, map keys, report."""

from .architecture import Tower, describe
from .files import Weights, open_weights
from .fill import LoadReport
from .heads import available_adaptors
from .keys import CheckpointError
from .load import load_model
from .stream import load_weights

__all__ = [
    "CheckpointError",
    "LoadReport",
    "Tower",
    "Weights",
    "available_adaptors",
    "describe",
    "load_model",
    "load_weights",
    "open_weights",
]
