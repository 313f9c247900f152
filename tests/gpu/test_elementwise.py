"""The elementwise kernels and the whole tower at real sizes, on a real GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import rel_error
from kernel_checks import BF16, FP16, FP32, doubled, randn
from radio_triton import RadioConfig, RadioModel
from radio_triton.kernels import activation, patchify, position, qk_norm, residual
from radio_triton.packing import Packing

pytestmark = pytest.mark.gpu
op = torch.ops.radio_triton
WIDTHS = [768, 1024, 1152, 1280, 1536]
TOKENS, EPS = 4136, 1e-6
# the op, its eager form, its arguments
Case = tuple[Callable, Callable, tuple]


def embedding(width: int, dtype: torch.dtype, stream: torch.dtype) -> tuple:
    packing = Packing([(32, 32), (64, 48), (1, 7)], [(16, 20)] * 4, prefix=10, device="cuda")
    counts = (packing.image_patches, packing.patches - packing.image_patches)
    return (
        *(randn(n, width, dtype=dtype) for n in counts),
        *(randn(10, width, dtype=dtype), randn(128, 128, width, dtype=dtype)),
        *(
            packing.grid_table,
            packing.grid_table_cpu,
            packing.cu_seqlens,
            packing.work_list(position.BLOCK_T),
        ),
        *(True, False, stream),
    )


def cases(width: int, dtype: torch.dtype, stream: torch.dtype) -> dict[str, Case]:
    x, y = randn(TOKENS, width, dtype=stream), randn(TOKENS, width, dtype=dtype)
    vectors = [randn(width, dtype=dtype) for _ in range(3)]
    norm = (*vectors[1:], EPS, dtype)
    qkv = randn(TOKENS, 3, width // 64, 64, dtype=dtype)
    inner = 2 * randn(TOKENS, 4 * width, dtype=dtype)
    return {
        "layer_norm": (op.layer_norm, residual.layer_norm_eager, (x, *norm)),
        "residual": (op.layerscale_residual, residual.layerscale_residual_eager, (x, y, vectors[0])),
        "qk_rms_norm": (op.qk_rms_norm, qk_norm.qk_rms_norm_eager, (qkv, *vectors[1:], EPS, width)),
        "square_sums": (op.qk_square_sums, qk_norm.qk_square_sums_eager, (qkv, width)),
        "gelu": (op.gelu, activation.gelu_eager, (inner,)),
        "swiglu": (op.swiglu, activation.swiglu_eager, (inner,)),
        "embed": (op.embed_tokens, position.embed_tokens_eager, embedding(width, dtype, stream)),
    }


NAMES = list(cases(64, FP32, FP32)) if torch.cuda.is_available() else ["none"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("dtype", "stream"), [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32)])
def test_real_sizes(dtype: torch.dtype, stream: torch.dtype, width: int, name: str) -> None:
    call, eager, args = cases(width, dtype, stream)[name]
    wide = [torch.float64 if isinstance(x, torch.dtype) else doubled(x) for x in args]
    truth, got = eager(*wide), call(*args)
    assert rel_error(got, truth) <= 2 * rel_error(eager(*args), truth)
    assert all(torch.equal(call(*args), got) for _ in range(5))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("dtype", "stream"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)])
def test_residual_and_norm_in_one_pass(dtype: torch.dtype, stream: torch.dtype, width: int) -> None:
    x, y = randn(TOKENS, width, dtype=stream), randn(TOKENS, width, dtype=dtype)
    scale, weight, bias = (randn(width, dtype=dtype) for _ in range(3))
    want = op.layerscale_residual(x, y, scale)
    kept, normed = op.layerscale_residual_norm(x, y, scale, weight, bias, EPS, dtype)
    assert torch.equal(kept, want)
    truth = residual.layer_norm_eager(kept.double(), weight.double(), bias.double(), EPS, torch.float64)
    eager = residual.layer_norm_eager(kept, weight, bias, EPS, dtype)
    assert rel_error(normed, truth) <= 2 * rel_error(eager, truth)
    assert torch.equal(op.layerscale_residual_norm_(x, y, scale, weight, bias, EPS, dtype), normed)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("tubelet", [1, 2])
@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("pixels", [torch.uint8, BF16, FP32])
def test_patchify(pixels: torch.dtype, patch: int, tubelet: int) -> None:
    shapes = [(1, 3, 32 * patch, 32 * patch), (5, 3, 16 * patch, 20 * patch), (3, 3, patch, 7 * patch)]
    videos = [torch.randint(256, shape, dtype=torch.uint8, device="cuda") for shape in shapes]
    if pixels.is_floating_point:
        videos = [(x / 255).to(pixels) for x in videos]
    statistics = torch.tensor([0.48, 0.46, 0.41]).cuda(), torch.tensor([0.27, 0.26, 0.28]).cuda()
    for dtype in (BF16, FP32):
        rest = (*statistics, patch, tubelet, dtype)
        parts = [op.patchify(x, *rest) for x in videos]
        wide = [x.double() / (1 if pixels.is_floating_point else 255) for x in videos]
        doubles = [x.double() for x in statistics]
        for x, y, part in zip(videos, wide, parts, strict=True):
            truth = patchify.patchify_eager(y, *doubles, patch, tubelet, torch.float64)
            assert rel_error(part, truth) <= 2 * rel_error(patchify.patchify_eager(x, *rest), truth)
            strided = x.contiguous(memory_format=torch.channels_last)
            assert torch.equal(op.patchify(strided, *rest), part)
        assert torch.equal(op.patchify_list(videos, *rest), torch.cat(parts))
        assert torch.equal(
            op.patchify_list([x.transpose(2, 3).contiguous().mT for x in videos], *rest), torch.cat(parts)
        )


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gelu_of_every_16_bit_value(dtype: torch.dtype) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).view(64, 1024).cuda()
    got, finite = op.gelu(x), x.isfinite()
    truth, eager = (activation.gelu_eager(y)[finite] for y in (x.double(), x))
    assert rel_error(got[finite], truth) <= 2 * rel_error(eager, truth)
    assert got[x.isnan()].isnan().all() and got[x == torch.inf].item() == torch.inf


def tower(**options: Any) -> RadioModel:
    config = RadioConfig(num_hidden_layers=4, **options)
    return RadioModel(config, dtype=BF16, device="cuda").requires_grad_(False).eval()


@pytest.mark.parametrize("options", [{"layer_scale": True}, {"qk_normalization": True}], ids=["plain", "qk"])
def test_the_tower_against_float64_and_alone_against_packed(options: dict[str, bool]) -> None:
    model = tower(**options)
    images = [torch.rand(3, h, w, device="cuda") for h, w in ((512, 512), (256, 384), (64, 64))]
    got = model(images).last_hidden_state
    other = RadioModel(model.config, dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    truth = other([x.cpu().to(BF16).double() for x in images]).last_hidden_state
    on_cpu = RadioModel(model.config, dtype=BF16)
    on_cpu.load_state_dict(model.state_dict())
    eager = on_cpu([x.cpu().to(BF16) for x in images]).last_hidden_state
    assert rel_error(got, truth) <= 2 * rel_error(eager, truth)
    assert torch.equal(model(images).last_hidden_state, got)


def test_nothing_waits_for_the_device() -> None:
    model, image = tower(), torch.rand(2, 3, 512, 512, device="cuda")
    frames = [torch.rand(3, 256, 384, device="cuda"), torch.rand(3, 64, 64, device="cuda")]
    for x in (image, frames):
        model(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_launches_of_a_layer() -> None:
    model, image = tower(), torch.rand(2, 3, 512, 512, device="cuda")
    model(image)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model(image)
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if "emcpy" not in e.name and "emset" not in e.name]
    # 4 layers of 8; a GEMM may be two kernels (split k), and there are about 10 before and after
    assert 32 <= len(kernels) <= 64


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_second_device(name: str) -> None:
    call, _, args = cases(1280, BF16, BF16)[name]
    moved = [x.to("cuda:1") if isinstance(x, Tensor) and x.is_cuda else x for x in args]
    assert torch.equal(call(*moved).cpu(), call(*args).cpu())


def test_more_than_2_to_the_31_elements() -> None:
    rows = 2**31 // 5120 + 8
    x = torch.zeros(rows, 5120, dtype=BF16, device="cuda")
    x[-1] = torch.randn(5120, device="cuda")
    want = op.gelu(x[-1:].clone())
    op.gelu_(x)
    assert torch.equal(x[-1:], want)
    last = x[-4:].clone()
    weight, bias = randn(5120, dtype=BF16), randn(5120, dtype=BF16)
    assert torch.equal(
        op.layer_norm(x, weight, bias, EPS, BF16)[-4:], op.layer_norm(last, weight, bias, EPS, BF16)
    )
