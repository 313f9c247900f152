"""Every released version as a file of its true names, shapes and dtypes, whose tensors take no room on the disk.

Geometry, tokens, teachers and key names are those of the public reference, written out here a second time: nothing
comes from `radio_triton`. Where nobody has published a fact, the value is one that the version may have.
"""

import argparse
import json
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Trunk:
    """One trunk of the reference; `millions`: its parameters with position table, as counted there."""

    width: int
    depth: int
    heads: int
    hidden: int
    millions: float
    patch: int = 16
    # how LayerScale is spelled, where there is one
    scale: str = ""
    mlp_norm: bool = False
    # the DINOv2 wrapper: SwiGLU, final norm, patch bias, everything under `inner.`
    dino: bool = False
    register_token: bool = False


TRUNKS = {
    "vit_base_patch16_224": Trunk(768, 12, 12, 3072, 98.23),
    "vit_base_patch16_v2_224": Trunk(768, 12, 12, 3072, 98.25, scale="grandma", register_token=True),
    "vit_large_patch16_224": Trunk(1024, 24, 16, 4096, 319.88),
    "vit_large_patch16_v2_224": Trunk(1024, 24, 16, 4096, 319.93, scale="grandma", register_token=True),
    "vit_huge_patch14_224": Trunk(1280, 32, 16, 5120, 637.64, patch=14),
    "vit_huge_patch16_224": Trunk(1280, 32, 16, 5120, 651.64),
    "vit_huge_patch16_224_mlpnorm": Trunk(1280, 32, 16, 5120, 651.97, mlp_norm=True),
    "vit_so400m_patch16_224": Trunk(1152, 27, 16, 4304, 431.23),
    "vit_so400m_v2_patch16_224": Trunk(1152, 27, 16, 4320, 432.23),
    "vit_giant_patch16_224": Trunk(1536, 40, 24, 6144, 1159.6),
    "vit_bigG_patch14_224": Trunk(1664, 48, 16, 6656, 1632.5, patch=14, scale="gamma"),
    "dino_v2_g_student": Trunk(1536, 40, 24, 4096, 1159.5, patch=14, scale="grandma", dino=True),
}


@dataclass(frozen=True)
class Release:
    """One file. tokens: class, registers, summary, as the rules make them of `teachers`, which are names, with "!"
    where there is no summary. form: "hub" (.pth.tar), "remote" or "vlm" (shards of a vision-language model).
    """

    version: str
    arch: str
    form: str
    tokens: tuple[int, int, tuple[int, ...]]
    teachers: str
    multiple: int | None = None
    pixels: int = 2048
    dtype: torch.dtype = torch.float32
    kwargs: dict[str, Any] = field(default_factory=dict)
    tubelet: int = 1
    normalizers: bool = False

    @property
    def trunk(self) -> Trunk:
        """The trunk, with a LayerScale of plain timm where `kwargs` ask for one."""
        trunk = TRUNKS[self.arch]
        return Trunk(**{**vars(trunk), "scale": "gamma"}) if self.kwargs.get("init_values") else trunk

    @property
    def grid(self) -> int:
        """Side of the position table."""
        return self.pixels // self.trunk.patch

    @property
    def facts(self) -> dict[str, Any]:
        """What a reader of the file must find, under the names of RadioConfig."""
        t = self.trunk
        return {
            "hidden_size": t.width, "num_hidden_layers": t.depth, "num_attention_heads": t.heads,
            "intermediate_size": t.hidden, "patch_size": t.patch, "position_grid": (self.grid, self.grid),
            "num_cls_tokens": self.tokens[0], "num_registers": self.tokens[1], "summary_idxs": self.tokens[2],
            "layer_scale": bool(t.scale), "mlp_norm": t.mlp_norm, "use_swiglu_ffn": t.dino, "final_norm": t.dino,
            "patch_bias": t.dino, "qkv_bias": True, "qk_normalization": False, "cpe": True, "layer_norm_eps": 1e-6,
            "pos_align_corners": False, "scaled_layer_norm": bool(self.kwargs.get("scaled_ln")),
            "video_temporal_patch_size": self.tubelet, "video_projection": self.tubelet > 1,
        }  # fmt: skip

    @property
    def args(self) -> dict[str, Any]:
        """What the training script was called with."""
        teachers = [
            {"name": t.rstrip("!"), "use_summary": not t.endswith("!")} for t in self.teachers.split()
        ]
        return {
            "model": self.arch, "model_kwargs": self.kwargs, "model_norm": False, "cpe_max_size": self.pixels,
            "teachers": teachers, "cls_token_per_teacher": not self.trunk.dino, "cpe_num_registers": None,
            "register_multiple": self.multiple, "dtype": self.dtype, "amp_dtype": torch.bfloat16,
            "input_size": None, "in_chans": None, "spectral_reparam": False, "damp": None, "mlp_version": "v2",
        }  # fmt: skip


EARLY = "clip openai_clip dino_v2"
SAM = "clip siglip dino_v2 sam!"
SIGLIP2, SIGLIP2_G = "clip siglip2 dino_v2 sam!", "clip siglip2-g dino_v2 sam!"
V4 = "siglip2-g dino_v3_7b sam3!"
FOUR, TEN = (4, 4, (0, 1, 2)), (3, 7, (0, 1))


def _releases() -> list[Release]:
    base, large, huge = (f"vit_{size}_patch16_224" for size in ("base", "large", "huge"))
    four, ten = {"tokens": FOUR, "multiple": 8}, {"tokens": TEN, "teachers": V4, "multiple": 10}
    half, scale = {"dtype": torch.bfloat16}, {"kwargs": {"init_values": 1e-5}}
    giant = "vit_giant_patch16_224"
    five = {"tokens": (5, 3, (0, 1, 2)), "teachers": f"{SAM} florence!", "multiple": 8}
    dino = {"tokens": (1, 4, (0,)), "teachers": SAM, "pixels": 1792}
    mlp_norm = {"arch": f"{huge}_mlpnorm", "form": "remote", "multiple": 16}
    omni = {"arch": huge, "form": "vlm", "tubelet": 2, **half}
    return [
        Release("radio_v1", "vit_huge_patch14_224", "hub", (3, 0, (0, 1, 2)), EARLY, pixels=1050),
        Release("radio_v2", huge, "hub", teachers=f"{EARLY} sam!", **four),
        # nobody has said whether these have the norm in the MLP: the file does
        Release("radio_v2", f"{huge}_mlpnorm", "hub", teachers=f"{EARLY} sam!", **four),
        *(Release("radio_v2.1", huge, form, teachers=f"{EARLY} sam!", **four, **half) for form in FORMS),
        *(Release("radio_v2.5-b", base, form, teachers=SAM, **four) for form in FORMS),
        *(Release("radio_v2.5-l", large, form, teachers=SAM, **four) for form in FORMS),
        Release("radio_v2.5-h", huge, "hub", **five),
        Release("radio_v2.5-h-norm", huge, "hub", **five, normalizers=True),
        *(Release("radio_v2.5-g", "dino_v2_g_student", form, **dino) for form in FORMS),
        Release("C-RADIO", tokens=(3, 13, (0, 1, 2)), teachers=EARLY, **mlp_norm),
        Release("C-RADIO", tokens=(4, 12, (0, 1, 2, 3)), teachers=f"{EARLY} sam", **mlp_norm),
        Release("C-RADIO", tokens=(4, 12, (0, 1, 2)), teachers=SAM, **mlp_norm),
        Release("C-RADIOv2-B", base, "remote", teachers=SAM, **four),
        Release("C-RADIOv2-L", large, "remote", teachers=SAM, **four),
        Release("C-RADIOv2-H", huge, "remote", teachers=SAM, **four),
        *(Release("c-radio_v2-g", giant, form, teachers=SAM, **four) for form in FORMS),
        *(Release("c-radio_v2-vlm-h", huge, form, teachers=SAM, **four) for form in (*FORMS, "vlm")),
        *(Release("c-radio_v3-b", "vit_base_patch16_v2_224", form, teachers=SIGLIP2, **four) for form in FORMS),
        *(Release("c-radio_v3-l", "vit_large_patch16_v2_224", form, teachers=SIGLIP2, **four) for form in FORMS),
        Release("c-radio_v3-h", huge, "remote", teachers=SIGLIP2_G, **four),
        *(Release("c-radio_v3-h", huge, form, teachers=SIGLIP2_G, **four, **scale) for form in FORMS),
        Release("c-radio_v3-g", giant, "remote", teachers=SIGLIP2_G, **four),
        Release("c-radio_v3-g", giant, "hub", teachers=SIGLIP2_G, **four, kwargs={"scaled_ln": True}),
        *(Release("c-radio_v4-so400m", "vit_so400m_patch16_224", form, **ten) for form in FORMS),
        *(Release("c-radio_v4-h", huge, form, **ten) for form in FORMS),
        Release("nemotron-parse", huge, "vlm", teachers=SAM, **four),
        Release("nemotron-3-nano-omni", tokens=TEN, teachers=V4, multiple=10, **omni),
        # the real file's args list four teachers, which makes 4 + 6 of the same ten
        Release("nemotron-3-nano-omni", tokens=(4, 6, (0, 1)), teachers=f"{V4} x!", multiple=10, **omni),
    ]  # fmt: skip


FORMS = ("hub", "remote")
RELEASES = _releases()
# trunks that no released version is known to have
OTHERS = [
    Release("", "vit_so400m_v2_patch16_224", "hub", TEN, V4, 10),
    Release("", "vit_bigG_patch14_224", "hub", TEN, V4, 10),
]


def trunk_shapes(release: Release) -> Shapes:
    """The reference's names, relative to the trunk."""
    t = release.trunk
    pixels = 3 * t.patch**2
    shapes: Shapes = {
        "patch_generator.embedder.weight": (t.width, pixels),
        "patch_generator.pos_embed": (1, release.grid**2, t.width),
        "patch_generator.cls_token.token": (sum(release.tokens[:2]), t.width),
    }
    if release.tubelet > 1:
        shapes["patch_generator.video_embedder.weight"] = (t.width, release.tubelet * pixels)
    if t.register_token:
        shapes["reg_token"] = (1, 4, t.width)
    for i in range(t.depth):
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block_shapes(t).items()}
    if t.dino:
        shapes |= {"patch_generator.embedder.bias": (t.width,), "mask_token": (1, t.width)}
        shapes |= {"norm.weight": (t.width,), "norm.bias": (t.width,)}
        return {f"inner.{name}": shape for name, shape in shapes.items()}
    return shapes


def block_shapes(t: Trunk) -> Shapes:
    """One block."""
    first, last, rows = ("mlp.w12", "mlp.w3", 2 * t.hidden) if t.dino else ("mlp.fc1", "mlp.fc2", t.hidden)
    linears = {
        "attn.qkv": (3 * t.width, t.width), "attn.proj": (t.width, t.width), first: (rows, t.width),
        last: (t.width, t.hidden),
    }  # fmt: skip
    norms = {"norm1": t.width, "norm2": t.width, **({"mlp.norm": t.hidden} if t.mlp_norm else {})}
    shapes: Shapes = {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    shapes |= {f"{name}.{leaf}": (size,) for name, size in norms.items() for leaf in ("weight", "bias")}
    return shapes | ({f"ls{i}.{t.scale}": (t.width,) for i in (1, 2)} if t.scale else {})


def mlp_shapes(width: int, inner: int, out: int) -> Shapes:
    """The MLP of a head."""
    linears = {"fc1": (inner, width), "blocks.0.2": (inner, inner), "final.2": (out, inner)}
    shapes: Shapes = {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    return shapes | {
        f"{n}.{leaf}": (inner,) for n in ("blocks.0.0", "final.0") for leaf in ("weight", "bias")
    }


def attention_shapes(width: int) -> Shapes:
    """A spatial head with attention, which names its two blocks as the trunk does."""
    trunk = Trunk(width, 2, 16, 4 * width, 0, scale="gamma")
    block = {name: shape for name, shape in block_shapes(trunk).items() if name != "attn.qkv.bias"}
    shapes = {f"blocks.{i}.{name}": shape for i in (0, 1) for name, shape in block.items()}
    mlp = {name: shape for name, shape in mlp_shapes(width, width, 1536).items() if "blocks" not in name}
    return shapes | {f"mlp.{name}": shape for name, shape in mlp.items()}


def head_shapes(release: Release) -> Shapes:
    """What stands beside the trunk in a .pth.tar: heads, by index or, since v4, by name, and normalizers."""
    width, depth, shapes = release.trunk.width, release.trunk.depth, {}
    for i, teacher in enumerate(release.teachers.split()):
        name = teacher.rstrip("!")
        head = name if release.teachers.startswith(V4) else str(i)
        attention = release.teachers.startswith(V4) and name == "siglip2-g"
        spatial = attention_shapes(width) if attention else mlp_shapes(width, 1520, 1024)
        groups = {"_feature_projections": spatial}
        groups |= {} if teacher.endswith("!") else {"_heads": mlp_shapes(width, 1520, 1536)}
        shapes |= {f"{group}.{head}.{key}": s for group, found in groups.items() for key, s in found.items()}
    if release.normalizers:
        shapes |= {"_feature_normalizer.mean": (width,), "_feature_normalizer.tx": (width, width)}
        sizes = {"alphas": (depth,), "means": (depth, width), "rotation": (width, width)}
        shapes |= {f"_intermediate_feature_normalizer.{name}": size for name, size in sizes.items()}
    return shapes


def write_release(release: Release, folder: Path) -> tuple[Path, Shapes]:
    """The file (or folder), and what in it is no part of the tower."""
    mean, std = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
    statistics = {"norm_mean": mean, "norm_std": std}
    values = {f"input_conditioner.{k}": torch.tensor(v).view(3, 1, 1) for k, v in statistics.items()}
    trunk = trunk_shapes(release)
    if release.form == "hub":
        stray = head_shapes(release)
        if release.trunk.dino:
            stray |= {f"base_model.input_conditioner.{name}": (3, 1, 1) for name in statistics}
        shapes = {f"base_model.{name}": shape for name, shape in trunk.items()} | stray
        return write_sparse_pth(folder / "release.pth.tar", shapes, values, release), stray
    prefix = {"remote": "", "vlm": "vision_model."}[release.form]
    if release.version == "nemotron-parse":
        prefix = "encoder.model_encoder."
    values |= {"summary_idxs": torch.tensor(release.tokens[2])}
    values = {f"{prefix}radio_model.{name}": value for name, value in values.items()}
    stray = LANGUAGE if release.form == "vlm" else {}
    shapes = {f"{prefix}radio_model.model.{name}": shape for name, shape in trunk.items()} | stray
    args = {k: str(v).removeprefix("torch.") if "dtype" in k else v for k, v in release.args.items()}
    config: dict[str, Any] = {"args": args, "version": release.version, "adaptor_names": None}
    if release.tubelet > 1:
        config |= {"video_temporal_patch_size": release.tubelet, "separate_video_embedder": True}
    config = {"vision_config": config, "model_type": "a_vlm"} if release.form == "vlm" else config
    (folder / "config.json").write_text(json.dumps(config))
    if release.form == "vlm":
        write_sparse_shards(folder, shapes, values, release.dtype)
    else:
        write_sparse_safetensors(folder / "model.safetensors", shapes, values, release.dtype)
    return folder, stray


LANGUAGE: Shapes = {
    "language_model.backbone.embeddings.weight": (131072, 2688),
    "language_model.backbone.layers.0.norm.weight": (2688,),
    "mlp1.0.weight": (5120,), "mlp1.1.weight": (20480, 5120), "mlp1.3.weight": (2688, 20480),
    "vision_projector.vision_final_layernorm.weight": (1280,),
    "encoder.conv1.weight": (1024, 1280, 1), "encoder.layer_norm1.weight": (1024,),
    "decoder.layers.0.fc1.weight": (4096, 1024),
}  # fmt: skip
KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


def write_sparse_safetensors(path: Path, shapes: Shapes, values: dict[str, Any], dtype: torch.dtype) -> None:
    """A file of true length; only `values` are written."""
    header, content, end = {}, {}, 0
    for key in (*shapes, *values):
        shape, kind = (values[key].shape, values[key].dtype) if key in values else (shapes[key], dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        header[key] = {"dtype": KINDS[kind], "shape": list(shape), "data_offsets": [end, end + size]}
        content |= {end: values[key].numpy().tobytes()} if key in values else {}
        end += size
    head = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
        for offset, data in content.items():
            file.seek(8 + len(head) + offset)
            file.write(data)


def write_sparse_shards(folder: Path, shapes: Shapes, values: dict[str, Any], dtype: torch.dtype) -> None:
    """The tower in two shards; the language model in a third, which is not there."""
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    table = {key: names[2] if key in LANGUAGE else names["blocks.1" in key] for key in (*shapes, *values)}
    for name in names[:2]:
        mine = {key: shape for key, shape in shapes.items() if table[key] == name}
        write_sparse_safetensors(
            folder / name, mine, {k: v for k, v in values.items() if table[k] == name}, dtype
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def write_sparse_pth(path: Path, shapes: Shapes, values: dict[str, Any], release: Release) -> Path:
    """What torch.save writes, with room for the tensors; only `values` are written into it."""
    state = {key: torch.empty(shape, dtype=release.dtype) for key, shape in shapes.items()} | values
    content = {"arch": release.arch, "epoch": 300, "args": argparse.Namespace(**release.args)}
    with torch.serialization.skip_data():
        torch.save(content | {"state_dict": state}, path)
    shared = torch.serialization.set_default_mmap_options(mmap.MAP_SHARED)
    with shared, torch.serialization.safe_globals([argparse.Namespace]):
        room = torch.load(path, weights_only=True, mmap=True)["state_dict"]
    for key, value in values.items():
        room[key].copy_(value)
    return path
