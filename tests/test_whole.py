"""A random tower of RADIO-H's depth and width: interpreted kernels against eager, bf16 against float64.

All large weights are windows of one buffer, so 32 distinct layers take the memory of two.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import RadioConfig as TransformersConfig
from transformers import RadioModel as TransformersModel

from helpers import rel_error
from kernel_checks import DEVICE, interpret
from radio_triton import RadioConfig, RadioModel, ops
from radio_triton.kernels import activation, patchify, position, qk_norm, residual, varlen_attention
from radio_triton.packing import Packing

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16
SIZES = {"hidden_size": 1280, "num_attention_heads": 16, "num_hidden_layers": 32}
CONFIG = RadioConfig(**SIZES, layer_scale=True, num_cls_tokens=2, num_registers=0, position_grid=(8, 8))


def draw(config: RadioConfig) -> dict[str, Tensor]:
    """Weights that bf16 holds exactly, of a size at which every part of a block matters."""
    buffer = (0.03 * torch.randn(9_000_000)).to(BF16).float()
    model = RadioModel(config, device="meta")
    small = {"hidden_size": 16, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 16}
    state = dict(RadioModel(config.replace(**small)).named_buffers())
    for i, (name, x) in enumerate(model.named_parameters()):
        if x.numel() > 1_000_000:
            # windows that no two layers share, with rows at different places
            state[name] = buffer[7 * i * 1111 % 2_400_000 :][: x.numel()].view(x.shape)
        else:
            centre = 1.0 if ".norm" in name and name.endswith("weight") else 0.5 if "lambda1" in name else 0.0
            state[name] = (centre + 0.05 * torch.randn(x.shape)).to(BF16).float()
    return state


def ours(state: dict[str, Tensor], dtype: torch.dtype, **options: Any) -> RadioModel:
    """The tower with these weights in a dtype, frozen."""
    model = RadioModel(CONFIG, device="meta", **options)
    model.load_state_dict(cast(state, dtype), assign=True)
    return model.requires_grad_(False).eval()


def cast(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights in a dtype, windows still of one buffer; the pixel statistics stay fp32."""
    large = next(x for x in state.values() if x.numel() > 1_000_000)
    whole = torch.as_strided(large, (large.untyped_storage().nbytes() // 4,), (1,), 0).to(dtype)

    def convert(name: str, x: Tensor) -> Tensor:
        if x.numel() > 1_000_000:
            return whole[x.storage_offset() :][: x.numel()].view(x.shape)
        return x if "conditioner" in name or not x.is_floating_point() else x.to(dtype)

    return {name: convert(name, x) for name, x in state.items()}


def theirs(state: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """Transformers' tower with the same weights."""
    config = TransformersConfig(
        **SIZES, mlp_ratio=4.0, num_cls_tokens=2, num_registers=0, max_img_size=128, summary_idxs=[0, 1]
    )
    with torch.device("meta"):
        model = TransformersModel(config)
    named = {}
    for name, x in cast(state, dtype).items():
        head, found, tail = name.partition("attention.qkv.")
        if found:
            for part, rows in zip("qkv", x.chunk(3), strict=True):
                named[f"{head}attention.{part}_proj.{tail}"] = rows
        else:
            named[name.replace("attention.proj.", "attention.o_proj.")] = x
    model.load_state_dict(named, assign=True)
    return model.requires_grad_(False).eval()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Sends every op to its Triton launcher, with the work list that a GPU would get; counts the calls."""
    interpret(residual._kernel, monkeypatch)
    calls: Counter[str] = Counter()
    modules = (activation, patchify, position, qk_norm, residual, varlen_attention)

    def work(lengths: Tensor, block: int) -> Tensor:
        return Packing([(1, n) for n in lengths.diff().tolist()], prefix=0).work_list(block)

    def with_work(name: str, args: list[Any]) -> list[Any]:
        if name == "varlen_attention":
            args[6] = varlen_attention.block_m(80, args[0].dtype, (8, 0), 16, args[4].diff().tolist())
            args[5] = work(args[4], args[6])
        if name == "embed_tokens":
            args[7] = work(args[6], position.BLOCK_T)
        return args

    def route(name: str) -> Callable:
        launcher = f"{name}inplace_triton" if name.endswith("_") else f"{name}_triton"
        (function,) = [getattr(module, launcher) for module in modules if hasattr(module, launcher)]

        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*with_work(name, list(args)))

        return call

    for name in ops.OPS:
        monkeypatch.setitem(ops._op, name, route(name))
    return calls


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu has real sizes")
def test_interpreted_kernels_make_the_eager_tower(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ours(draw(CONFIG), torch.float32)
    # one program for each head, row or block of a row: about 20 seconds for four tokens
    images = [torch.rand(3, 16, 32)]
    got = model(images)
    assert got.last_hidden_state.shape == (2 + 2, 1280)
    assert launched == Counter(
        {"patchify_list": 1, "embed_tokens": 1, "layer_norm": 1, "varlen_attention": 32, "gelu_": 32}
        | {"layerscale_residual_norm_": 63, "layerscale_residual_": 1}
    )
    monkeypatch.undo()
    want = model(images)
    assert rel_error(got.last_hidden_state, want.last_hidden_state) <= 1e-5
    assert rel_error(got.summary, want.summary) <= 1e-5


def test_bf16_is_nearer_to_the_truth_with_an_fp32_stream() -> None:
    state, x = draw(CONFIG), torch.rand(1, 3, 48, 64).to(BF16)
    truth = ours(state, torch.float64)(x.double()).last_hidden_state

    def error(model: nn.Module) -> float:
        return rel_error(model(x).last_hidden_state, truth)

    pure, wide = error(ours(state, BF16)), error(ours(state, BF16, residual_dtype=torch.float32))
    other = error(theirs(state, BF16))
    print(f"errors: fp32 stream {wide:.3g}, pure bf16 {pure:.3g}, Transformers {other:.3g}")
    assert wide <= 0.6 * pure
    assert wide <= other
