"""Every released version loads from a file of its true keys, shapes and form, and is what its preset says; relatives
of RADIO are refused by name.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from bench import versions
from checkpoints import args_of, gelu_model, remote_config, state_of, torch_hub, write_folder, write_pth
from loading import refused
from radio_triton import RadioConfig, RadioModel
from radio_triton.checkpoint import Tower, describe, open_weights
from radio_triton.checkpoint.fill import Filler
from radio_triton.checkpoint.inspection import inspect_checkpoint
from radio_triton.checkpoint.load import build, check
from radio_triton.presets import get_preset
from released import (
    OTHERS,
    RELEASES,
    TRUNKS,
    Release,
    Shapes,
    head_shapes,
    trunk_shapes,
    write_release,
    write_sparse_pth,
    write_sparse_safetensors,
)

BY_NAME = [f"{r.version or r.arch}-{r.form}-{i}" for i, r in enumerate([*RELEASES, *OTHERS])]


def opened(path: Path) -> tuple[Tower, RadioModel]:
    """The tower of a file, and the model that it fits in full, on the meta device."""
    weights = open_weights(path)
    tower = describe(weights)
    model = build(RadioModel, weights, tower, None, None)
    assert set(check(Filler(model), weights, tower)) <= {"summary_idxs"}
    return tower, model


@pytest.mark.parametrize("release", [*RELEASES, *OTHERS], ids=BY_NAME)
def test_release(release: Release, tmp_path: Path) -> None:
    path, stray = write_release(release, tmp_path)
    tower, model = opened(path)
    config = tower.config
    assert {name: getattr(config, name) for name in release.facts} == release.facts
    assert tower.dtype == model.dtype == release.dtype
    unused = {key for key in tower.ignored if key.endswith(("reg_token", "mask_token"))}
    assert len(unused) == release.trunk.register_token + release.trunk.dino
    # normalizers change the features, so they are read where they are
    normalizers = {key for key in stray if "normalizer." in key}
    assert set(tower.ignored) - normalizers == {*stray, *unused} - normalizers
    assert len(tower.adaptors) == (len(release.teachers.split()) if release.form == "hub" else 0)
    assert len(tower.normalizers) == 2 * release.normalizers
    assert {name: getattr(config, name) for name in stated(release)} == stated(release)
    # the first block, end to end
    loaded = RadioModel.from_pretrained(path, num_hidden_layers=1)
    assert loaded.config == config.replace(num_hidden_layers=1)
    assert loaded.input_conditioner.norm_mean.flatten().tolist() == torch.tensor(config.norm_mean).tolist()


def stated(release: Release) -> dict[str, Any]:
    """What the preset of a release says of it, where the file must agree."""
    if not release.version:
        return {}
    preset = get_preset(release.version)
    # what a new model starts from, where nobody has said whether the release has LayerScale
    free = {"layerscale_value"} if "layer_scale" in preset.unknown else set()
    if release.tokens == (4, 6, (0, 1)):
        # the preset has Transformers' 3 + 7 of the same ten tokens
        free |= {"num_cls_tokens", "num_registers"}
    if release.form == "hub":
        # a .pth.tar does not name its version, which alone decides on windows
        free |= {name for name in preset.fields if name.startswith("vitdet_")}
    return {name: value for name, value in preset.fields.items() if name not in free}


def test_every_preset_has_a_file() -> None:
    assert {release.version for release in RELEASES} == set(RadioConfig.presets())
    on_the_hub = {name for name in RadioConfig.presets() if get_preset(name).hub_id}
    assert on_the_hub <= {release.version for release in RELEASES if release.form != "hub"}


@pytest.mark.parametrize("arch", TRUNKS)
def test_parameters_are_as_many_as_in_the_reference(arch: str, tmp_path: Path) -> None:
    release = next(r for r in [*RELEASES, *OTHERS] if r.arch == arch and not r.kwargs)
    model = opened(write_release(release, tmp_path)[0])[1]
    prefix, width = model.config.num_prefix_tokens, model.config.hidden_size
    bare = sum(parameter.numel() for parameter in model.parameters()) - prefix * width
    digits = len(str(release.trunk.millions).partition(".")[2])
    # counted with the prefix tokens of one release or another
    counts = {round((bare + tokens * width) / 1e6, digits) for tokens in (5, 8, 10)}
    assert release.trunk.millions in counts


H = next(r for r in RELEASES if r.version == "c-radio_v4-h" and r.form == "remote")
ERADIO: Shapes = {
    "patch_embed.conv_down.0.conv.weight": (192, 3, 3, 3), "patch_embed.conv_down.0.bn.weight": (192,),
    "levels.0.blocks.cv1.conv.weight": (192, 192, 1, 1), "levels.1.blocks.m.0.cv2.bn.bias": (384,),
    "levels.2.downsample.reduction.0.weight": (1536, 768, 3, 3),
    "levels.2.blocks.0.attention_blocks.0.attn.qkv.weight": (2304, 768),
    "levels.2.blocks.0.attention_blocks.0.attn.pos_emb_funct.cpb_mlp.0.weight": (512, 2),
    "levels.3.blocks.4.attention_blocks.0.mlp.fc1.weight": (6144, 1536),
    "high_res_neck.neck_features_proj.0.conv1.weight": (1536, 768, 3, 3), "norm.weight": (1536,),
}  # fmt: skip
RADIO1D: Shapes = trunk_shapes(H) | {
    "_iter_count": (1,), "downscale_blocks.0.norm.weight": (5120,),
    "downscale_blocks.0.reduction.weight": (2560, 5120), "prefix_proj_blocks.0.weight": (2560, 1280),
    "decoder.filler_tokens": (1024, 2560), "decoder.prefix_tokens": (10, 2560),
    "decoder.blocks.0.attn.qkv.weight": (7680, 2560), "decoder.norm.weight": (2560,),
    "decoder.upscale_blocks.0.expansion.weight": (5120, 2560),
}  # fmt: skip
HYBRID: Shapes = {f"vit.{name}": shape for name, shape in trunk_shapes(H).items()} | {
    "conv.stem.0.weight": (192, 3, 4, 4), "vit_to_conv_fusion.fwd.0.weight": (192, 1280)}  # fmt: skip
RELATIVES = {
    "E-RADIO": (ERADIO, "hybrid of convolutions and windowed attention, not a ViT"),
    "RADIO1D": (RADIO1D, "encoder and decoder that merges and splits patches"),
    "a hybrid": (HYBRID, "joins a ViT and a ConvNeXt"),
}


@pytest.mark.parametrize("form", ["hub", "remote"])
@pytest.mark.parametrize("family", RELATIVES)
def test_relatives_are_refused_by_their_keys(family: str, form: str, tmp_path: Path) -> None:
    shapes, reason = RELATIVES[family]
    if form == "hub":
        path = write_sparse_pth(
            tmp_path / "x.pth.tar", {f"base_model.{k}": v for k, v in shapes.items()} | head_shapes(H), {}, H
        )
    else:
        path = tmp_path / "model.safetensors"
        write_sparse_safetensors(
            path, {f"radio_model.model.{k}": v for k, v in shapes.items()}, {}, torch.float32
        )
    refused(path, f"the file holds {family}.*{reason}.*is not supported")
    told = inspect_checkpoint(path)
    assert told.refused and family in told.refused and reason in told.refused


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        ("eradio_large_fullres_ws16", "E-RADIO is a hybrid of convolutions and windowed attention"),
        ("radio1d_huge_patch16_224", "RADIO1D is an encoder and decoder"),
        ("navit_huge_patch16", "NaViT students rotate queries and keys"),
        ("hybrid_vit_huge_convnext", "it joins two trunks"),
        ("vit_huge_patch16_224_dyt", "replaces LayerNorm by DyT"),
    ],
)
@pytest.mark.parametrize("form", ["hub", "remote"])
def test_relatives_are_refused_by_their_name(arch: str, reason: str, form: str, tmp_path: Path) -> None:
    model = gelu_model()
    if form == "hub":
        path = write_pth(tmp_path, torch_hub(state_of(model)), args_of(model.config, model=arch))
    else:
        path = write_folder(tmp_path, state_of(model), remote_config(model.config, model=arch))
    with pytest.raises(ValueError, match=f"'{arch}' is not supported: .*{reason}"):
        RadioModel.from_pretrained(path)


@pytest.mark.parametrize("name", ["e-radio_v2", "nvidia/E-RADIO", "radio1d_huge_patch16_224"])
def test_relatives_are_no_presets(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not supported: (E-RADIO|RADIO1D) is an? "):
        RadioConfig.preset(name)


def test_readme_has_the_table_of_the_presets() -> None:
    text = versions.README.read_text(encoding="utf-8")
    assert versions.readme(text) == text, "run python -m bench.versions --write"
    table = versions.table()
    assert all(f"| `{name}` |" in table for name in RadioConfig.presets())


def test_the_table_says_what_is_not_known() -> None:
    rows = {
        line.split("|")[1].strip(" `"): line.split("|")
        for line in versions.table().splitlines()
        if "|" in line
    }
    assert [cell.strip() for cell in rows["c-radio_v4-so400m"][5:9]] == [
        "3 + 7",
        "2 × 1152 = 2304",
        "–",
        "431 M",
    ]
    assert [cell.strip() for cell in rows["c-radio_v3-h"][5:9]] == [
        "4 + 4", "3 × 1280 = 3840", "*file*: LayerScale", "652 M"]  # fmt: skip
    assert rows["c-radio_v3-g"][3].strip() == "40 × 1536, 24 heads, MLP *file*"
    with pytest.raises(ValueError, match="lacks <!-- versions -->"):
        versions.readme("no markers")
