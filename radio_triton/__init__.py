"""RADIO vision encoders on one packed stream of tokens.

The names below are looked up on first use, so `import radio_triton` costs nothing and loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radio_triton.checkpoint import available_adaptors
    from radio_triton.config import RadioConfig
    from radio_triton.model import RadioModel, RadioOutput
    from radio_triton.packing import Packing

__version__ = "0.1.0"
__all__ = ["Packing", "RadioConfig", "RadioModel", "RadioOutput", "__version__", "available_adaptors"]

_HOME = {
    "Packing": "packing",
    "RadioConfig": "config",
    "RadioModel": "model",
    "RadioOutput": "model",
    "available_adaptors": "checkpoint",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
