"""Files and arrays of every kind become upright uint8 (3, H, W); resizing is antialiased."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from radio_triton.image import fit_image, read_image, resize_image


def nearest_8(height: int, width: int) -> tuple[int, int]:
    return max(8, round(height / 8) * 8), max(8, round(width / 8) * 8)


def random_rgb(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def saved(image: Image.Image, format: str = "PNG", **options: object) -> io.BytesIO:
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    buffer.seek(0)
    return buffer


def chw(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.copy()).permute(2, 0, 1)


def test_file_path_pil_array_and_tensor_agree(tmp_path: Path) -> None:
    rgb = random_rgb(5, 7)
    path = tmp_path / "x.png"
    Image.fromarray(rgb).save(path)
    want = chw(rgb)
    for source in (path, str(path), path.open("rb"), Image.open(path), rgb, want, want.float() / 255):
        got = read_image(source)
        assert got.dtype == torch.uint8 and got.is_contiguous()
        assert torch.equal(got, want)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    rgb = random_rgb(4, 6)
    exif = Image.Exif()
    exif[0x0112] = orientation
    turns = {
        1: rgb,
        2: rgb[:, ::-1],
        3: rgb[::-1, ::-1],
        4: rgb[::-1],
        5: rgb.transpose(1, 0, 2),
        6: np.rot90(rgb, -1),
        7: rgb[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(rgb),
    }
    assert torch.equal(read_image(saved(Image.fromarray(rgb), exif=exif)), chw(turns[orientation]))


def test_exif_rotated_jpeg_swaps_its_sides() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_image(saved(Image.new("RGB", (30, 20)), "JPEG", exif=exif)).shape == (3, 30, 20)


def test_transparent_parts_lie_on_white() -> None:
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 0] = 200
    rgba[0, :, 3] = (0, 51, 255)
    want = torch.tensor([[[255, 244, 200]], [[255, 204, 0]], [[255, 204, 0]]], dtype=torch.uint8)
    assert torch.equal(read_image(saved(Image.fromarray(rgba))), want)
    assert torch.equal(read_image(rgba), want)


def test_grey_with_alpha() -> None:
    grey = Image.merge("LA", (Image.new("L", (2, 1), 100), Image.new("L", (2, 1), 0)))
    grey.putpixel((1, 0), (100, 255))
    assert read_image(saved(grey)).tolist() == [[[255, 100]]] * 3


def test_palette_with_and_without_transparency() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    assert read_image(saved(image)).tolist() == [[[10, 40]], [[20, 50]], [[30, 60]]]
    assert read_image(saved(image, transparency=0)).tolist() == [[[255, 40]], [[255, 50]], [[255, 60]]]


@pytest.mark.parametrize("mode", ["1", "L"])
def test_grey_becomes_three_equal_channels(mode: str) -> None:
    image = Image.new(mode, (3, 2), 0)
    image.putpixel((1, 1), 255)
    want = torch.zeros(3, 2, 3, dtype=torch.uint8)
    want[:, 1, 1] = 255
    assert torch.equal(read_image(saved(image)), want)


def test_sixteen_bits_are_scaled_not_cut() -> None:
    levels = np.array([[0, 257, 257 * 128, 65535]], np.uint16)
    want = [[[0, 1, 128, 255]]] * 3
    assert read_image(saved(Image.fromarray(levels))).tolist() == want
    assert read_image(saved(Image.fromarray(levels.astype(np.int32)), "TIFF")).tolist() == want
    assert read_image(levels).tolist() == want


def test_cmyk_and_float_tiff() -> None:
    assert read_image(saved(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "TIFF")).flatten().tolist() == [
        255,
        0,
        0,
    ]
    assert read_image(saved(Image.fromarray(np.full((1, 1), 0.5, np.float32)), "TIFF")).unique().tolist() == [
        128
    ]


def test_first_frame_of_an_animation() -> None:
    first, second = Image.new("RGB", (2, 2), "red"), Image.new("RGB", (2, 2), "blue")
    got = read_image(saved(first, "GIF", save_all=True, append_images=[second]))
    assert got[:, 0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        (np.full((2, 2), 1.5), ValueError, r"\[0, 1\]"),
        (np.full((2, 2), np.nan), ValueError, r"\[0, 1\]"),
        (np.zeros((2, 2), np.int64), TypeError, "int64"),
        (np.zeros((2, 2, 5), np.uint8), ValueError, r"\(2, 2, 5\)"),
        (np.zeros((0, 2, 3), np.uint8), ValueError, "at least one pixel"),
        (torch.zeros(1, 3, 2, 2), ValueError, r"\(1, 3, 2, 2\)"),
        (7, TypeError, "not int"),
        (io.BytesIO(b"not an image"), ValueError, "not an image"),
    ],
)
def test_bad_sources_are_refused_in_words(source: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_image(source)  # type: ignore[arg-type]


def test_truncated_file_raises() -> None:
    data = saved(Image.fromarray(random_rgb(64, 64)), "JPEG").getvalue()
    with pytest.raises(OSError, match="truncated"):
        read_image(io.BytesIO(data[: len(data) // 2]))


def test_same_size_is_untouched_and_flat_stays_flat() -> None:
    image = read_image(random_rgb(8, 16))
    assert resize_image(image, 8, 16) is image
    assert resize_image(torch.full((3, 37, 53), 77, dtype=torch.uint8), 24, 80).unique().tolist() == [77]


def test_shrinking_averages_what_it_drops() -> None:
    checks = (np.indices((64, 64)).sum(axis=0) % 2 * 255).astype(np.uint8)
    inner = resize_image(read_image(checks), 8, 8)[:, 1:-1, 1:-1].int()
    assert (inner - 127).abs().max() <= 2  # without antialiasing all 0 or all 255


def test_resizing_agrees_with_pillow() -> None:
    photo = Image.fromarray(random_rgb(40, 60)).resize((240, 160), Image.Resampling.BICUBIC)
    want = chw(np.asarray(photo.resize((96, 64), Image.Resampling.BICUBIC)))
    # both stretch the cubic with a = -0.5 to the scale, but Pillow rounds and cuts after each axis
    difference = (resize_image(read_image(photo), 64, 96).int() - want.int()).abs().float()
    assert difference.max() <= 4 and difference.mean() < 0.6


@given(st.integers(1, 90), st.integers(1, 90), st.one_of(st.none(), st.integers(1, 100)))
def test_any_size_fits(height: int, width: int, long_side: int | None) -> None:
    image = torch.full((3, height, width), 9, dtype=torch.uint8)
    got = fit_image(image, nearest_8, long_side)
    assert got.shape[1] % 8 == got.shape[2] % 8 == 0
    assert got.unique().tolist() == [9]
    for side, new in zip((height, width), got.shape[1:], strict=True):
        scale = min(1.0, long_side / max(height, width)) if long_side else 1.0
        assert abs(new - side * scale) <= 8


def test_one_pixel_and_a_thread() -> None:
    assert fit_image(torch.zeros(3, 1, 1, dtype=torch.uint8), nearest_8).shape == (3, 8, 8)
    assert fit_image(torch.zeros(3, 1, 5000, dtype=torch.uint8), nearest_8, 512).shape == (3, 8, 512)


def test_importing_the_module_loads_no_pillow() -> None:
    code = "import sys, radio_triton.image; sys.exit('PIL' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
