"""The patchify kernels, dense and list: on a CUDA device where there is one, else in Triton's interpreter."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_checks import BF16, DEVICE, FP16, FP32, Traffic, assert_as_good_as, doubled, interpret
from radio_triton import ops  # noqa: F401  (a clear error where the kernels cannot be imported)
from radio_triton.kernels import patchify

# numpy says so wherever NaN is the point of a test
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
MEAN = torch.tensor([0.48, 0.46, 0.41, 0.5])
STD = torch.tensor([0.27, 0.26, 0.28, 0.5])
UINT8 = torch.uint8
LAYOUTS = ["contiguous", "channels_last", "cropped", "every_other", "flipped_axes", "expanded"]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(patchify._kernel, monkeypatch)


def pixels(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    x = torch.randint(256, shape, dtype=UINT8)
    return x.to(DEVICE) if dtype == UINT8 else (x / 255).to(DEVICE, dtype)


def laid_out(frames: Tensor, layout: str) -> Tensor:
    """The same values (F, c, H, W) in other strides."""
    count, channels, height, width = frames.shape
    if layout == "channels_last":
        return frames.contiguous(memory_format=torch.channels_last)
    if layout == "flipped_axes":
        # columns first: a stride of 1 between rows, and frames innermost
        return frames.permute(1, 3, 2, 0).contiguous().permute(3, 0, 2, 1)
    if layout == "expanded":
        return frames[:1].expand(count, -1, -1, -1)
    if layout in ("cropped", "every_other"):
        step = 1 if layout == "cropped" else 2
        wide = frames.new_full((count, channels, step * height + 3, step * width + 5), 77)
        view = wide[:, :, 3:, 5:][:, :, ::step, ::step]
        return view.copy_(frames)
    return frames


def statistics(channels: int, given: bool = True) -> tuple[Tensor | None, Tensor | None]:
    return (MEAN[:channels].to(DEVICE), STD[:channels].to(DEVICE)) if given else (None, None)


def truth(frames: Tensor, mean: Tensor | None, std: Tensor | None, *rest: Any) -> Tensor:
    # the eager form divides integers in fp32
    wide = frames.double() / 255 if frames.dtype == UINT8 else frames.double()
    return patchify.patchify_eager(wide, doubled(mean), doubled(std), *rest[:2], torch.float64)


def check(frames: Tensor, given: bool, patch: int, tubelet: int, dtype: torch.dtype) -> Tensor:
    call = (frames, *statistics(frames.shape[1], given), patch, tubelet, dtype)
    got = patchify.patchify_triton(*call)
    assert got.is_contiguous()
    assert_as_good_as(got, patchify.patchify_eager(*call), truth(*call))
    return got


@pytest.mark.parametrize("out", [BF16, FP16, FP32])
@pytest.mark.parametrize("dtype", [UINT8, BF16, FP16, FP32])
@pytest.mark.parametrize("patch", [16, 14, 8])
def test_parity(patch: int, dtype: torch.dtype, out: torch.dtype) -> None:
    check(pixels(1, 3, patch, 9 * patch, dtype=dtype), True, patch, 1, out)
    check(pixels(3, 3, 2 * patch, 2 * patch, dtype=dtype), False, patch, 2, out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [UINT8, BF16, FP32])
def test_any_strides(dtype: torch.dtype, layout: str) -> None:
    frames = laid_out(pixels(3, 3, 16, 40, dtype=dtype), layout)
    got = check(frames, True, 8, 2, BF16)
    assert torch.equal(got, patchify.patchify_triton(frames.contiguous(), *statistics(3), 8, 2, BF16))
    for channels, patch in ((1, 4), (4, 5)):
        check(laid_out(pixels(1, channels, 3 * patch, patch, dtype=dtype), layout), True, patch, 1, FP16)


@pytest.mark.parametrize(("count", "tubelet"), [(1, 1), (1, 4), (4, 2), (5, 2), (7, 3)])
def test_a_short_last_tubelet_repeats_the_last_frame(count: int, tubelet: int) -> None:
    frames = pixels(count, 3, 8, 12, dtype=UINT8)
    got = check(frames, True, 4, tubelet, FP32)
    missing = -count % tubelet
    whole = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))
    assert torch.equal(got, patchify.patchify_triton(whole, *statistics(3), 4, tubelet, FP32))


def as_list(videos: list[Tensor], patch: int, tubelet: int, dtype: torch.dtype, given: bool = True) -> Tensor:
    return patchify.patchify_list_triton(
        videos, *statistics(videos[0].shape[1], given), patch, tubelet, dtype
    )


@pytest.mark.parametrize("tubelet", [1, 2])
@pytest.mark.parametrize("dtype", [UINT8, BF16, FP32])
def test_a_list_is_its_videos_end_to_end(dtype: torch.dtype, tubelet: int) -> None:
    shapes = [(2, 3, 32, 16), (1, 3, 16, 48), (3, 3, 16, 144)]
    videos = [pixels(*shape, dtype=dtype) for shape in shapes]
    for given in (True, False):
        want = [patchify.patchify_triton(x, *statistics(3, given), 16, tubelet, BF16) for x in videos]
        assert torch.equal(as_list(videos, 16, tubelet, BF16, given), torch.cat(want))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [UINT8, FP16, FP32])
def test_a_list_of_any_strides(dtype: torch.dtype, layout: str) -> None:
    # the others keep the plain layout: one narrow video must not spoil them
    videos = [laid_out(pixels(3, 3, 8, 24, dtype=dtype), layout), pixels(1, 3, 16, 8, dtype=dtype)]
    want = [patchify.patchify_triton(x, *statistics(3), 8, 2, FP32) for x in videos]
    for order in (videos, videos[::-1]):
        parts = want if order is videos else want[::-1]
        assert torch.equal(as_list(order, 8, 2, FP32), torch.cat(parts))


def test_what_a_list_knows_of_its_alignment() -> None:
    plain = pixels(2, 3, 32, 32, dtype=BF16)
    shifted = pixels(2 * 3 * 32 * 32 + 1, dtype=BF16)[1:].view(2, 3, 32, 32)
    assert plain.data_ptr() % 16 == 0
    assert patchify._alignment([plain]) == 8 and patchify._alignment([plain, shifted]) == 1
    assert patchify._alignment([plain[..., :16]]) == 8 and patchify._alignment([plain[..., 4:20]]) == 4
    assert patchify._alignment([pixels(1, 3, 32, 32, dtype=UINT8)]) == 16
    assert patchify._alignment([pixels(1, 3, 28, 28, dtype=FP32)]) == 4
    want = patchify.patchify_triton(shifted, *statistics(3), 16, 1, BF16)
    assert torch.equal(as_list([shifted, plain], 16, 1, BF16)[: len(want)], want)


def test_nan_in_a_neighbour_changes_nothing() -> None:
    frames = pixels(3, 3, 32, 32)
    clean = patchify.patchify_triton(frames, *statistics(3), 16, 1, FP32)
    frames[1] = math.nan
    for got in (
        patchify.patchify_triton(frames, *statistics(3), 16, 1, FP32),
        as_list([*frames.split(1)], 16, 1, FP32),
    ):
        assert got[4:8].isnan().all()
        assert torch.equal(got[:4], clean[:4]) and torch.equal(got[8:], clean[8:])
    # nor does a patch of the same image
    frames = pixels(1, 3, 32, 32)
    frames[:, :, 16:, :16] = math.nan
    got = patchify.patchify_triton(frames, *statistics(3), 16, 1, FP32)
    assert got.isnan().all(1).tolist() == [False, False, True, False] and not got[[0, 1, 3]].isnan().any()


class Launches(list):
    """Stands in for a kernel: keeps the grid of each launch."""

    def __getitem__(self, grid: Any) -> Callable:
        return lambda *args, **options: self.append(grid)


def test_nothing_is_launched_for_nothing_and_grids_may_be_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    for name in ("_kernel", "_list_kernel"):
        monkeypatch.setattr(patchify, name, launches)
    empty = pixels(0, 3, 32, 32)
    assert patchify.patchify_triton(empty, *statistics(3), 16, 2, BF16).shape == (0, 2 * 768)
    assert as_list([empty, empty], 16, 1, BF16).shape == (0, 768)
    assert not launches
    many = torch.zeros(1, 3, 16, 16, dtype=UINT8, device=DEVICE).expand(40_000, -1, -1, -1)
    patchify.patchify_triton(many, *statistics(3), 16, 1, BF16)
    as_list([many[:20_000]] * 2, 16, 2, BF16)
    assert launches == [(120_000,), (120_000,)]


def test_a_list_with_an_empty_video() -> None:
    videos = [pixels(0, 3, 16, 16), pixels(2, 3, 16, 32), pixels(1, 3, 0, 16)]
    want = patchify.patchify_triton(videos[1], *statistics(3), 16, 1, FP32)
    assert torch.equal(as_list(videos, 16, 1, FP32), want)


@pytest.mark.skipif(DEVICE == "cuda", reason="masks are counted in the interpreter")
@pytest.mark.parametrize("dtype", [UINT8, FP32])
@pytest.mark.parametrize("patch", [16, 14])
def test_bytes_moved(patch: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    videos = [pixels(2, 3, patch, 3 * patch, dtype=dtype), pixels(3, 3, 2 * patch, patch, dtype=dtype)]
    traffic = Traffic(monkeypatch)
    out = patchify.patchify_triton(videos[0], *statistics(3), patch, 2, BF16)
    assert traffic.loaded(videos[0]) == traffic.stored(out) == {1}
    assert traffic.stores.total() == out.numel()
    traffic = Traffic(monkeypatch)
    out = as_list(videos, patch, 2, BF16)
    assert traffic.loaded(videos[0]) == traffic.loaded(videos[1][:2]) == traffic.stored(out) == {1}
    # the last frame of three fills two places
    assert traffic.loaded(videos[1][2]) == {2}
    assert traffic.stores.total() == out.numel()
