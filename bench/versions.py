"""README's table of released versions, made from the presets.

    python -m bench.versions [--write]

Prints the table; --write puts it into README.md, between <!-- versions --> and <!-- /versions -->.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radio_triton import RadioConfig, RadioModel
from radio_triton.presets import PRESETS, REFUSED, Preset

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- versions -->", "<!-- /versions -->"
HEAD = (
    "version",
    "Hugging Face",
    "trunk",
    "patch, table",
    "class + register",
    "summary",
    "also",
    "parameters",
)
FEATURES = {
    "layer_scale": "LayerScale",
    "mlp_norm": "LayerNorm in the MLP",
    "final_norm": "final norm",
    "scaled_layer_norm": "scaled LayerNorms",
    "use_swiglu_ffn": "SwiGLU",
}
# what a reader of the table cannot know from the presets, and a loader reads
OPEN = "*file*"


def trunk(fields: Mapping[str, Any]) -> str:
    """Blocks, width, heads and MLP."""
    blocks, width, heads = (
        fields[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    return f"{blocks} × {width}, {heads} heads, MLP {fields.get('intermediate_size', OPEN)}"


def features(preset: Preset) -> str:
    """What the trunk has beyond a plain ViT, with what nobody has stated in brackets."""
    fields = preset.fields
    has = [text for name, text in FEATURES.items() if fields.get(name)]
    has += (
        [f"tubelets of {fields['video_temporal_patch_size']}"]
        if "video_temporal_patch_size" in fields
        else []
    )
    asked = [text for name, text in FEATURES.items() if name in preset.unknown]
    return ", ".join([*has, *([f"{OPEN}: {', '.join(asked)}"] if asked else [])]) or "–"


def parameters(preset: Preset) -> str:
    """Millions, where every size is known."""
    if "intermediate_size" in preset.unknown:
        return OPEN
    # none of these shows in whole millions
    given: dict[str, Any] = {"num_cls_tokens": 4, "num_registers": 4, "summary_idxs": (0,)}
    given |= {"norm_mean": (0.5,) * 3, "norm_std": (0.5,) * 3, "mlp_norm": False, "layer_scale": False}
    config = RadioConfig.preset(preset.name, **{name: given[name] for name in preset.unknown})
    return f"{sum(x.numel() for x in RadioModel(config, device='meta').parameters()) / 1e6:.0f} M"


def row(preset: Preset) -> tuple[str, ...]:
    """One version, a text for each column of HEAD."""
    fields = preset.fields
    side = fields["patch_size"] * fields["position_grid"][0]
    tokens = " + ".join(str(fields.get(name, OPEN)) for name in ("num_cls_tokens", "num_registers"))
    count = len(fields["summary_idxs"]) if "summary_idxs" in fields else None
    return (
        f"`{preset.name}`",
        f"`{preset.hub_id}`" if preset.hub_id else "–",
        trunk(fields),
        f"{fields['patch_size']}, {side} px",
        tokens if tokens != f"{OPEN} + {OPEN}" else OPEN,
        OPEN if count is None else f"{count} × {fields['hidden_size']} = {count * fields['hidden_size']}",
        features(preset),
        parameters(preset),
    )


def table() -> str:
    """The table, and what is refused, as Markdown."""
    lines = [HEAD, ("---",) * len(HEAD), *map(row, PRESETS)]
    reasons = dict.fromkeys(
        f"{word}: {reason}" for word, reason in sorted(REFUSED.items()) if word != "e-radio"
    )
    return "\n".join(
        [
            *(f"| {' | '.join(cells)} |" for cells in lines),
            "",
            f"{OPEN}: nothing public states it; `from_pretrained` reads it from the checkpoint or asks for it. Sizes "
            "and features come from the tensors of a file, never from the name of its version.",
            "",
            f"Refused by name, with the reason: {'; '.join(reasons)}.",
        ]
    )


def readme(text: str) -> str:
    """README.md with the table of today; ValueError where the markers are not there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks {BEGIN} … {END}: put them where the table belongs")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())


if __name__ == "__main__":
    main()
