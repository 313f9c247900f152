"""NVIDIA's names: all there, with NVIDIA's meaning, and all in the table of docs/from_nvidia.md."""

import re
from pathlib import Path

import pytest
import torch

from radio_triton import RadioModel
from radio_triton.nvidia_api import NvidiaApi, Resolution, read_preferred
from tiny import pixels, tiny_model

TABLE = (Path(__file__).resolve().parent.parent / "docs" / "from_nvidia.md").read_text()
GOLDEN = Path(__file__).parent / "data" / "torchhub-adaptors" / "checkpoint.pth.tar"
# what RADIOModel of NVlabs/RADIO has
NAMES = (
    "adaptors", "blocks", "cpe_video_mode", "embed_dim", "forward_intermediates", "input_conditioner",
    "get_nearest_supported_resolution", "make_preprocessor_external", "max_resolution", "min_resolution_step", "model",
    "num_cls_tokens", "num_summary_tokens", "patch_size", "preferred_resolution", "radio_model", "summary_dim",
    "switch_to_deploy", "window_size",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_name_is_there_and_in_the_table(name: str) -> None:
    assert hasattr(tiny_model(), name)
    rows = [line.split("|")[1] for line in TABLE.splitlines() if line.startswith("| ")]
    assert any(re.search(rf"\b{name}\b", row) for row in rows)


def test_every_property_of_ours_is_a_name_of_theirs() -> None:
    ours = {name for name in vars(NvidiaApi) if not name.startswith("_")}
    assert ours <= set(NAMES)


def test_values() -> None:
    model = tiny_model(position_grid=(8, 10), summary_idxs=(1, 0, 1))
    assert (model.patch_size, model.embed_dim, model.min_resolution_step) == (4, 32, 4)
    assert model.max_resolution == 40 and model.config.max_resolution == (32, 40)
    assert (model.summary_dim, model.num_summary_tokens, model.num_cls_tokens) == (96, 5, 3)
    assert model(pixels(1, 3, 8, 8)).summary.shape == (1, model.summary_dim)
    assert model.preferred_resolution is model.window_size is None
    assert len(model.blocks) == 2 and model.model.blocks[0] is model.encoder.layer[0]
    assert model.radio_model is model
    # no property became part of the state
    assert set(model.state_dict()) == set(tiny_model().state_dict())


def test_window_size_sets_the_step() -> None:
    model = tiny_model(vitdet_window_size=3)
    assert (model.window_size, model.min_resolution_step) == (3, 12)
    assert tuple(model.get_nearest_supported_resolution(20, 30)) == (24, 24)


def test_calls_that_change_nothing() -> None:
    model = tiny_model().requires_grad_(False)
    x = pixels(4, 3, 8, 12)
    want = model(x).features.clone()
    model.switch_to_deploy()
    with model.cpe_video_mode(2):
        assert torch.equal(model(x).features, want)
    with pytest.raises(ValueError, match="at least 1 frame"), model.cpe_video_mode(0):
        pass


def test_code_written_for_their_dict() -> None:
    model = RadioModel.from_pretrained(GOLDEN, adaptor_names=["clip", "sam"])
    output = model(pixels(1, 3, 32, 48), feature_fmt="NCHW")
    summary, features = output["backbone"]
    assert summary is output.summary and features.shape == (1, 64, 2, 3)
    summary, features = output["sam"]
    assert summary.shape == (1, 32) and features.shape == (1, 32, 4, 6)
    assert list(output.adaptors) == list(model.adaptors) == ["clip", "sam"]
    with pytest.raises(KeyError, match=r"no output 'dino': there are \['backbone', 'clip', 'sam'\]"):
        output["dino"]


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ([512, 768], (512, 768)),
        (432, (432, 432)),
        (None, None),
        ([1, 2, 3], None),
        ([0, 4], None),
        ("768", None),
    ],
)
def test_preferred_resolution(given: object, want: tuple[int, int] | None) -> None:
    assert read_preferred({"preferred_resolution": given}) == want
    assert read_preferred(None) is None
    assert Resolution(512, 768).height == 512
