"""A RadioConfig from keys and shapes first, from the checkpoint's args or config.json second."""

from collections.abc import Mapping
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from ..config import RadioConfig
from ..presets import heads_for_width
from .files import Weights
from .keys import STATISTICS, CheckpointError, Slot

Shapes = Mapping[str, tuple[int, ...]]
# args.model_kwargs that contradict the shapes of a DINOv2 trunk, whose name says nothing of its size
_DINO_KWARGS = {"embed_dim": "hidden_size", "depth": "num_hidden_layers", "patch_size": "patch_size"}
_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "patch_size", "qkv_bias")
_MOST_BLOCKS = 4096


def read_config(weights: Weights, slots: Mapping[str, Slot], overrides: Mapping[str, Any]) -> RadioConfig:
    """The architecture: shapes first, then `overrides`, then what the checkpoint states. See `describe` for
    errors.
    """
    shapes = {slot.name: _whole(weights.entries[key].shape, slot) for key, slot in slots.items()}
    buffers = {slot.name: weights.read(key) for key, slot in slots.items() if slot.name in STATISTICS}
    source = weights.statement
    stated = None if source is None else _understand(source)
    dino = str(weights.stated_args.get("model", "")).startswith("dino_v2")
    mean = buffers.get("input_conditioner.norm_mean")
    channels = overrides.get("num_channels") or (
        stated.num_channels if stated else 3 if mean is None else mean.numel()
    )
    facts = _facts(shapes, channels) | {"num_hidden_layers": _depth(slots)}
    claims = _claims(stated, facts, dino, weights.stated_args.get("model_kwargs"))
    _compare(claims | {key: value for key, value in overrides.items() if key in facts}, facts, overrides)
    grid = stated.position_grid if stated else None
    facts["position_grid"] = _table_sides(shapes, overrides.get("position_grid"), grid)
    facts |= _tokens(stated, shapes, buffers.get("summary_idxs"), overrides)
    facts |= _statistics(stated, buffers) | {"num_channels": channels}
    if "num_attention_heads" not in overrides and (
        stated is None or stated.hidden_size != facts["hidden_size"]
    ):
        width = facts["hidden_size"]
        # every DINOv2 has heads of 64
        facts["num_attention_heads"] = width // 64 if dino and width % 64 == 0 else heads_for_width(width)
    base = stated.to_dict() if stated else {}
    return RadioConfig.from_hf({**base, **facts}, **overrides)


def _understand(source: dict[str, Any]) -> RadioConfig:
    """What a config states; CheckpointError for one that says something else or something not supported."""
    try:
        return RadioConfig.from_hf(source)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    except Exception as error:
        raise CheckpointError(
            f"not a RADIO config that can be understood: {type(error).__name__}: {error}"
        ) from error


def _whole(shape: tuple[int, ...], slot: Slot) -> tuple[int, ...]:
    """The shape of the parameter that a part is of."""
    return (shape[0] * slot.parts, *shape[1:]) if slot.part is not None and shape else shape


def _depth(slots: Mapping[str, Slot]) -> int:
    """How many blocks the file has; they must be numbered 0 … n - 1."""
    blocks = {slot.block for slot in slots.values() if slot.block is not None}
    if not blocks:
        raise CheckpointError(
            "the file has no transformer blocks: expected keys such as blocks.0.attn.qkv.weight"
        )
    if absent := sorted(set(range(min(max(blocks), _MOST_BLOCKS))) - blocks):
        raise CheckpointError(
            f"the file has block {max(blocks)}, but not block {', '.join(map(str, absent[:20]))}"
        )
    return len(blocks)


def _facts(shapes: Shapes, channels: int) -> dict[str, Any]:
    """Fields of RadioConfig that keys and shapes show."""
    first = "encoder.layer.0."
    projection = shapes["embeddings.patch_projection.weight"]
    if len(projection) != 2:
        raise CheckpointError(
            f"the patch projection has shape {projection}: expected (width, channels * patch * patch)"
        )
    width, row = projection
    patch = isqrt(row // channels)
    if channels * patch**2 != row:
        raise CheckpointError(
            f"the patch projection takes rows of {row} values, no square patch of {channels} channels"
        )
    gated = f"{first}mlp.gate_up_proj.weight" in shapes
    facts: dict[str, Any] = {
        "hidden_size": width,
        "patch_size": patch,
        "layer_scale": f"{first}layer_scale1.lambda1" in shapes,
        "mlp_norm": f"{first}mlp.norm.weight" in shapes,
        "qk_normalization": f"{first}attention.q_norm.weight" in shapes,
        "qkv_bias": f"{first}attention.qkv.bias" in shapes,
        "final_norm": "encoder.norm.weight" in shapes,
        "patch_bias": "embeddings.patch_projection.bias" in shapes,
        "use_swiglu_ffn": gated,
        "video_projection": "embeddings.video_patch_projection.weight" in shapes,
    }
    inner = shapes.get(f"{first}mlp.{'down_proj' if gated else 'fc2'}.weight", ())
    video = shapes.get("embeddings.video_patch_projection.weight", ())
    if len(inner) == 2:
        facts["intermediate_size"] = inner[1]
    if len(video) == 2:
        facts["video_temporal_patch_size"] = max(video[1] // row, 1)
        if video[1] % row or video[1] == row:
            raise CheckpointError(
                f"the video projection takes rows of {video[1]}, no multiple (2 or more) of the {row} of an image"
            )
    return facts


def _claims(stated: RadioConfig | None, facts: dict[str, Any], dino: bool, kwargs: Any) -> dict[str, Any]:
    """The fields in which the checkpoint's own statement must agree with the shapes."""
    if stated is None:
        return {}
    if dino:
        kwargs = kwargs if isinstance(kwargs, Mapping) else {}
        return {field: kwargs[key] for key, field in _DINO_KWARGS.items() if kwargs.get(key) is not None}
    names = set(_SIZES)
    if stated.use_swiglu_ffn != facts["use_swiglu_ffn"]:
        names.discard("intermediate_size")
    # what a config does not mention reads as 1 and as False
    names |= {"video_temporal_patch_size"} if stated.video_temporal_patch_size > 1 else set()
    names |= {"qk_normalization"} if stated.qk_normalization else set()
    return {name: getattr(stated, name) for name in names if name in facts}


def _compare(claims: Mapping[str, Any], facts: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """CheckpointError that shows both sides of every contradiction."""
    depth, count = facts["num_hidden_layers"], overrides.get("num_hidden_layers")
    if count is not None and (not isinstance(count, int) or not 1 <= count <= depth):
        raise CheckpointError(
            f"num_hidden_layers={count!r} asks for the first blocks of {depth}: pass 1 to {depth}"
        )
    wrong = sorted(
        name for name, value in claims.items() if name != "num_hidden_layers" and value != facts[name]
    )
    if count is None and claims.get("num_hidden_layers", depth) != depth:
        wrong.append("num_hidden_layers")
    if wrong:
        sides = "; ".join(f"{name} is {claims[name]}, but {facts[name]} in the weights" for name in wrong)
        cure = ", ".join(f"{name}={facts[name]}" for name in wrong)
        raise CheckpointError(
            f"config and weights contradict each other: {sides}. Where the weights are right, pass {cure}"
        )


def _table_sides(shapes: Shapes, given: Any, stated: tuple[int, int] | None) -> tuple[int, int]:
    """The sides of a flat table: those given or stated where they fit, else the square root, else an
    error.
    """
    table = shapes.get("embeddings.position_embedding", ())
    positions = table[1] if len(table) == 3 else 0
    if given is not None:
        sides = (given, given) if isinstance(given, int) else tuple(given)
        if len(sides) != 2 or sides[0] * sides[1] != positions:
            raise CheckpointError(
                f"position_grid={given} does not fit the {positions} rows of the position table"
            )
        return sides
    if stated and stated[0] * stated[1] == positions:
        return stated
    side = isqrt(positions)
    if not side or side * side != positions:
        raise CheckpointError(
            f"the position table has {positions} rows, neither "
            f"{' x '.join(map(str, stated or ())) or 'stated'} of the config nor a "
            "square: pass position_grid=(rows, columns)"
        )
    return side, side


def _tokens(
    stated: RadioConfig | None, shapes: Shapes, buffer: Tensor | None, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Class tokens, registers and summary: the overrides, else the saved buffer, else what is stated."""
    token = shapes.get("embeddings.cls_register_token", ())
    prefix = token[0] if len(token) == 2 else 0
    given = {name: overrides[name] for name in ("num_cls_tokens", "num_registers") if name in overrides}
    if stated and not given and stated.num_prefix_tokens != prefix:
        raise CheckpointError(
            f"config and weights contradict each other: {stated.num_cls_tokens} class tokens and "
            f"{stated.num_registers} registers, but {prefix} prefix tokens in the weights; pass "
            "num_cls_tokens=… and num_registers=…"
        )
    summary = _summary(stated, prefix, buffer, overrides)
    if summary is None and stated is None and not given:
        raise CheckpointError(
            f"summary_idxs=None means all class tokens: say how many of the {prefix} they are, num_cls_tokens=…"
        )
    count = max(stated.num_cls_tokens if stated else 1, 1 + max(summary or (0,)))
    if given:
        count = given["num_cls_tokens"] if "num_cls_tokens" in given else prefix - given["num_registers"]
    registers = given.get("num_registers", prefix - count)
    if count + registers != prefix or registers < 0 or count < 1:
        raise CheckpointError(
            f"{count} class tokens and {registers} registers do not make the {prefix} prefix tokens of the weights"
        )
    return {"num_cls_tokens": count, "num_registers": registers, "summary_idxs": summary}


def _summary(
    stated: RadioConfig | None, prefix: int, buffer: Tensor | None, overrides: Mapping[str, Any]
) -> tuple[int, ...] | None:
    """Which class tokens make the summary; None is all of them."""
    if "summary_idxs" in overrides:
        return None if overrides["summary_idxs"] is None else tuple(overrides["summary_idxs"])
    if buffer is not None:
        return tuple(buffer.flatten().tolist())
    if stated is None:
        raise CheckpointError(
            f"nothing here states which of the {prefix} prefix tokens make the summary: pass "
            "summary_idxs=(…), and num_cls_tokens=… unless the class tokens end with the last of them"
        )
    return stated.summary_idxs


def _statistics(stated: RadioConfig | None, buffers: Mapping[str, Tensor]) -> dict[str, Any]:
    """norm_mean and norm_std as the file has them; where it holds what is stated, only rounded, as stated."""
    found: dict[str, Any] = {}
    for name in ("norm_mean", "norm_std"):
        stored = buffers.get(f"input_conditioner.{name}")
        if stored is None:
            continue
        known = getattr(stated or RadioConfig, name)
        rounded = torch.equal(torch.tensor(known, dtype=torch.float64).to(stored.dtype), stored.flatten())
        found[name] = known if rounded else tuple(stored.flatten().tolist())
    return found
