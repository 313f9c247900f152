"""Names that users of `torch.hub.load("NVlabs/RADIO", "radio_model", ...)` know; docs/from_nvidia.md lists them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

    from .config import RadioConfig


class Resolution(NamedTuple):
    """Pixels."""

    height: int
    width: int


class NvidiaApi:
    """Properties and methods of NVIDIA's RADIOModel, in terms of ours."""

    config: "RadioConfig"
    encoder: Any
    adaptors: "nn.ModuleDict"
    # what config.json says; None where it says nothing, as in a .pth.tar
    preferred_resolution: Resolution | None = None

    @property
    def patch_size(self) -> int:
        """Sides of a patch in pixels."""
        return self.config.patch_size

    @property
    def window_size(self) -> int | None:
        """Sides of ViTDet's windows in patches; None without windows."""
        return self.config.vitdet_window_size

    @property
    def min_resolution_step(self) -> int:
        """Heights and widths are multiples of this many pixels."""
        return self.config.resolution_step

    @property
    def max_resolution(self) -> int:
        """The longer side of the image that the position table was made for; larger ones work."""
        return max(self.config.max_resolution)

    @property
    def embed_dim(self) -> int:
        """The width of a feature."""
        return self.config.hidden_size

    @property
    def summary_dim(self) -> int:
        """The width of the summary: all its class tokens, end to end."""
        return self.config.hidden_size * self.config.summary_size

    @property
    def num_summary_tokens(self) -> int:
        """Class and register tokens together, what stands before the patches: not what makes up the summary."""
        return self.config.num_prefix_tokens

    @property
    def num_cls_tokens(self) -> int:
        """Class tokens, and registers up to the last that an adaptor reads."""
        read: list[Any] = list(self.adaptors.values())
        return max([self.config.num_cls_tokens, *(adaptor.spec.token + 1 for adaptor in read)])

    @property
    def blocks(self) -> "nn.ModuleList":
        """The blocks; attention is `attention.qkv` and `attention.proj` in each."""
        return self.encoder.layer

    @property
    def radio_model(self) -> Any:
        """This model: NVIDIA's Hugging Face class wraps its own."""
        return self

    @property
    def model(self) -> Any:
        """This model: NVIDIA's wraps a timm trunk, whose `blocks` and `embed_dim` are here too."""
        return self

    def switch_to_deploy(self) -> None:
        """Nothing to do: only E-RADIO has a form of its own for deployment."""

    @contextmanager
    def cpe_video_mode(self, t: int) -> Iterator[None]:
        """No effect: NVIDIA's changes random crops of positions in training alone. `t`: frames of a video."""
        if t < 1:
            raise ValueError(f"a video has at least 1 frame, got t={t}")
        yield


def read_preferred(source: Any) -> Resolution | None:
    """`preferred_resolution` of a config.json, one side or (height, width)."""
    given = source.get("preferred_resolution") if source else None
    sides = [given, given] if isinstance(given, int) else given
    if not isinstance(sides, list | tuple) or len(sides) != 2:
        return None
    return Resolution(*sides) if all(isinstance(x, int) and x > 0 for x in sides) else None
