"""patchify against one loop for each index of the formula."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from op_checks import DTYPES, assert_rounded
from radio_triton import ops

op = torch.ops.radio_triton
MEAN, STD = torch.tensor([0.48, 0.46, 0.41]), torch.tensor([0.27, 0.26, 0.28])


def truth(frames: Tensor, mean: Tensor | None, std: Tensor | None, p: int, tubelet: int) -> Tensor:
    count, channels, height, width = frames.shape
    pixels = frames.double() / (1 if frames.is_floating_point() else 255)
    rows = []
    for n in range((count + tubelet - 1) // tubelet):
        for py in range(height // p):
            for px in range(width // p):
                row = []
                for k in range(tubelet):
                    frame = pixels[min(tubelet * n + k, count - 1)]
                    for c in range(channels):
                        cell = frame[c, p * py : p * py + p, p * px : p * px + p]
                        row.append((cell - (0 if mean is None else mean[c])) / (1 if std is None else std[c]))
                rows.append(torch.stack(row).flatten())
    return torch.stack(rows) if rows else torch.empty(0, tubelet * channels * p * p, dtype=torch.float64)


def bytes_(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


def assert_patches(got: Tensor, frames: Tensor, p: int, tubelet: int) -> None:
    # (1 + 0.48) / 0.26 is the largest sum of terms
    assert_rounded(got, truth(frames, MEAN.double(), STD.double(), p, tubelet), 6.0)


@pytest.mark.parametrize("tubelet", [1, 2, 3])
@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("pixels", [torch.uint8, *DTYPES])
def test_against_the_formula(pixels: torch.dtype, out: torch.dtype, tubelet: int):
    frames = (bytes_(4, 3, 4, 6) / 255).to(pixels) if pixels.is_floating_point else bytes_(4, 3, 4, 6)
    got = op.patchify(frames, MEAN, STD, 2, tubelet, out)
    assert got.dtype == out and got.is_contiguous()
    assert_patches(got, frames, 2, tubelet)


def test_order_is_frame_channel_row_column():
    k, c, y, x = torch.meshgrid(*(torch.arange(float(n)) for n in (4, 3, 4, 6)), indexing="ij")
    got = op.patchify(1000 * k + 100 * c + 10 * y + x, None, None, 2, 2, torch.float32)
    assert got.shape == (2 * 2 * 3, 2 * 3 * 2 * 2)
    # the second tubelet, its patch in row 1 and column 2
    want = [1000 * k + 100 * c + 10 * y + x for k in (2, 3) for c in range(3) for y in (2, 3) for x in (4, 5)]
    assert got[6 + 5].tolist() == want
    # tubelets first, then rows of patches, then columns
    first = [2000 * n + 10 * 2 * y + 2 * x for n in range(2) for y in range(2) for x in range(3)]
    assert got[:, 0].tolist() == first


def test_uint8_and_float_agree():
    frames = bytes_(2, 3, 32, 48)
    same = op.patchify(frames.float() / 255, MEAN, STD, 16, 1, torch.float32)
    assert (op.patchify(frames, MEAN, STD, 16, 1, torch.float32) - same).abs().max() <= 1e-6


def test_bf16_is_rounded_after_normalising():
    frames = bytes_(2, 3, 32, 32)
    want = op.patchify(frames, MEAN, STD, 16, 1, torch.float32).bfloat16()
    assert torch.equal(op.patchify(frames, MEAN, STD, 16, 1, torch.bfloat16), want)


def test_without_statistics_values_stay():
    frames = bytes_(3, 3, 4, 4)
    assert torch.equal(op.patchify(frames, None, None, 4, 1, torch.float32), frames.flatten(1) / 255)
    floats = torch.randn(3, 3, 4, 4)
    assert torch.equal(op.patchify(floats, None, None, 4, 1, torch.float32), floats.flatten(1))


@pytest.mark.parametrize(("count", "tubelet"), [(1, 2), (3, 2), (1, 4), (6, 4), (5, 5), (7, 3)])
def test_a_short_tubelet_repeats_the_last_frame(count: int, tubelet: int):
    frames = torch.randn(count, 3, 4, 4)
    missing = -count % tubelet
    padded = torch.cat([frames, *[frames[-1:]] * missing])
    got = op.patchify(frames, MEAN, STD, 2, tubelet, torch.float32)
    assert len(got) == (count + missing) // tubelet * 4
    assert torch.equal(got, op.patchify(padded, MEAN, STD, 2, tubelet, torch.float32))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_list_is_its_videos_end_to_end(data: st.DataObject):
    p, tubelet = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    sizes = data.draw(st.lists(st.tuples(*[st.integers(1, n) for n in (4, 3, 3)]), min_size=1, max_size=4))
    videos = [bytes_(count, 3, p * h, p * w) for count, h, w in sizes]
    got = op.patchify_list(videos, MEAN, STD, p, tubelet, torch.float32)
    assert torch.equal(got, torch.cat([op.patchify(v, MEAN, STD, p, tubelet, torch.float32) for v in videos]))
    start = 0
    for video in videos:
        rows = -(-len(video) // tubelet) * (video.shape[2] // p) * (video.shape[3] // p)
        assert_patches(got[start : start + rows], video, p, tubelet)
        start += rows
    assert start == len(got)


def test_each_video_repeats_its_own_last_frame():
    videos = [torch.full((3, 1, 2, 2), 1.0), torch.full((3, 1, 2, 2), 2.0)]
    got = op.patchify_list(videos, None, None, 2, 2, torch.float32)
    assert got.tolist() == [[1.0] * 8, [1.0] * 8, [2.0] * 8, [2.0] * 8]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_strides_do_not_matter(dtype: torch.dtype):
    frames = bytes_(3, 4, 6, 3).to(dtype)
    hwc = frames.permute(0, 3, 1, 2)
    turned = frames.permute(0, 3, 2, 1)
    windows = bytes_(5, 6, 9, 11).to(dtype)[::2, ::2, 1:9:2, 2:10]
    repeated = frames[:1].expand(3, 4, 6, 3).permute(0, 3, 1, 2)
    for view in (hwc, turned, windows, repeated, hwc.flip(3)[:, :, 1:3]):
        got = op.patchify(view, MEAN, STD, 2, 2, torch.float32)
        assert torch.equal(got, op.patchify(view.contiguous(), MEAN, STD, 2, 2, torch.float32))
    assert torch.equal(
        op.patchify_list([hwc, turned], MEAN, STD, 2, 2, torch.float32),
        torch.cat([op.patchify(x, MEAN, STD, 2, 2, torch.float32) for x in (hwc, turned)]),
    )


def test_pixels_are_not_touched():
    for dtype in (torch.float32, torch.float64):
        frames = torch.rand(2, 3, 4, 4, dtype=dtype)
        before = frames.clone()
        op.patchify(frames, MEAN, STD, 4, 1, dtype)
        assert torch.equal(frames, before)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4), (2, 3, 4, 0)])
@pytest.mark.parametrize("tubelet", [1, 2])
def test_no_pixels(shape: tuple[int, ...], tubelet: int):
    for frames in (torch.zeros(shape), torch.zeros(shape, dtype=torch.uint8)):
        got = op.patchify(frames, MEAN, STD, 2, tubelet, torch.bfloat16)
        assert got.shape == (0, tubelet * 12) and got.dtype == torch.bfloat16


@pytest.mark.parametrize("as_list", [False, True], ids=["dense", "list"])
def test_refusals(as_list: bool):
    def call(x: Tensor, *rest: Any) -> Tensor:
        return op.patchify_list([x], *rest) if as_list else op.patchify(x, *rest)

    frames = torch.zeros(1, 3, 4, 6)
    with pytest.raises(ValueError, match=r"\(F, c, H, W\), H and W multiples of 4, got \(1, 3, 4, 6\)"):
        call(frames, None, None, 4, 1, torch.float32)
    with pytest.raises(ValueError, match=r"got \(3, 4, 6\)"):
        call(frames[0], None, None, 2, 1, torch.float32)
    with pytest.raises(ValueError, match=r"uint8 or floating point pixels, got torch\.int64"):
        call(frames.long(), None, None, 2, 1, torch.float32)
    for mean, std in ((MEAN, None), (None, STD), (MEAN[:2], STD[:2])):
        with pytest.raises(ValueError, match="mean and std of 3 channels, or neither"):
            call(frames, mean, std, 2, 1, torch.float32)


def test_list_refusals():
    frames = torch.zeros(1, 3, 4, 6)
    with pytest.raises(ValueError, match="at least one video"):
        op.patchify_list([], None, None, 2, 1, torch.float32)
    with pytest.raises(ValueError, match=r"one dtype and device, got torch\.float32 on cpu and torch\.uint8"):
        op.patchify_list([frames, frames.byte()], None, None, 2, 1, torch.float32)
    with pytest.raises(ValueError, match=r"on cpu and torch\.float32 on meta"):
        op.patchify_list([frames, frames.to("meta")], None, None, 2, 1, torch.float32)
    with pytest.raises(ValueError, match="channels"):
        op.patchify_list([frames, frames[:, :1]], None, None, 2, 1, torch.float32)


def test_layers_take_a_tensor_or_a_list():
    frames = bytes_(2, 3, 4, 4)
    dense = ops.patchify(frames, MEAN, STD, 2, 1, torch.float32)
    assert torch.equal(ops.patchify([frames[:1], frames[1:]], MEAN, STD, 2, 1, torch.float32), dense)
    assert_patches(dense, frames, 2, 1)


def test_one_compilation_for_any_picture():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda *x: op.patchify(*x), backend=counter, fullgraph=True, dynamic=True)
    for shape in ((4, 3, 8, 6), (3, 3, 4, 10), (7, 3, 6, 4)):
        arguments = (bytes_(*shape), None, None, 2, 2, torch.float32)
        assert torch.equal(call(*arguments), op.patchify(*arguments))
    assert counter.frame_count == 1
