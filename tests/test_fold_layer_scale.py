"""from_pretrained(fold_layer_scale=True): the same function, without LayerScale."""

from pathlib import Path

import pytest
import torch

from checkpoints import remote_config, state_of, write_folder
from helpers import rel_error
from radio_triton import RadioModel
from tiny import frozen, pixels


@pytest.mark.parametrize("name", ["scaled", "qknorm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_folded_at_load_computes_the_same(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    model = frozen(name, num_dummy_heads=0, video_temporal_patch_size=1)
    folder = write_folder(tmp_path, state_of(model), remote_config(model.config))
    plain = RadioModel.from_pretrained(folder, dtype=dtype)
    folded = RadioModel.from_pretrained(folder, dtype=dtype, fold_layer_scale=True)
    assert not any("layer_scale" in key for key in folded.state_dict()) and not folded.config.layer_scale
    assert folded.dtype == dtype and not any(p.requires_grad for p in folded.parameters())
    assert any("layer_scale" in key for key in plain.state_dict())
    layer, scaled = folded.encoder.layer[0], plain.encoder.layer[0]
    want = scaled.layer_scale1.lambda1.double()[:, None] * scaled.attention.proj.weight.double()
    assert rel_error(layer.attention.proj.weight, want) <= 3 * torch.finfo(dtype).eps
    x = pixels(2, 3, 8, 12)
    limit = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    assert rel_error(folded(x).features, plain(x).features) <= limit
    assert folded.input_conditioner.norm_mean.dtype == torch.float32


def test_folding_what_is_not_there_changes_nothing(tmp_path: Path) -> None:
    model = frozen("swiglu", video_temporal_patch_size=1)
    folder = write_folder(tmp_path, state_of(model), remote_config(model.config))
    plain, folded = (
        RadioModel.from_pretrained(folder, num_attention_heads=2, fold_layer_scale=fold)
        for fold in (False, True)
    )
    for name, x in plain.state_dict().items():
        assert torch.equal(folded.state_dict()[name], x)
