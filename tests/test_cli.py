"""The commands as a user runs them, with the built-in model and tiny images."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import radio_triton
from helpers import rel_error
from radio_triton import cli
from radio_triton.demo_model import demo_model
from radio_triton.encode import by_budget, prefetch
from radio_triton.image import read_image, resize_image
from radio_triton.model import RadioModel
from radio_triton.ops import OPS
from radio_triton.storage import fingerprint, read_features, write_features


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(cli.main, [str(each) for each in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def photo(path: Path, width: int = 20, height: int = 17, seed: int = 0, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for i, (width, height) in enumerate([(20, 17), (40, 24), (9, 64)]):
        photo(tmp_path / "photos" / f"{'abc'[i]}.png", width, height, seed=i)
    return tmp_path / "photos"


@pytest.mark.parametrize("command", [[], ["encode"], ["viz"], ["demo"], ["doctor"]])
def test_help_loads_no_torch(command: list[str]) -> None:
    code = (
        "import sys; from radio_triton.cli import main; main([*sys.argv[1:], '-h'], standalone_mode=False); "
        "sys.exit(' '.join({'torch', 'numpy', 'PIL', 'tqdm'} & set(sys.modules)) or 0)"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage")


def test_version() -> None:
    assert radio_triton.__version__ in run("--version").output


def test_encode_writes_what_the_model_says(photos: Path, tmp_path: Path) -> None:
    result = run("encode", photos, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "encoded 3 images" in result.output and "radio-tiny-meanshift (a formula, not" in result.output
    assert written(tmp_path / "out") == [f"{name}.png.safetensors" for name in "abc"]
    model = demo_model()
    for name, size, fitted in [("a", (17, 20), (16, 16)), ("b", (24, 40), (24, 40)), ("c", (64, 9), (64, 8))]:
        path = tmp_path / "out" / f"{name}.png.safetensors"
        want = model.encode([resize_image(read_image(photos / f"{name}.png"), *fitted)])[0]
        got, facts = load_file(path), metadata(path)
        assert rel_error(got["features"], want.features) < 1e-5  # packed and alone differ in the last bits
        assert rel_error(got["summary"], want.summary) < 1e-5
        assert facts["source"] == f"{name}.png"
        assert json.loads(facts["original_size"]) == list(size)
        assert json.loads(facts["encoded_size"]) == list(fitted)
        assert json.loads(facts["grid"]) == [side // 8 for side in fitted]
        assert facts["model"] == "radio-tiny-meanshift"
        assert facts["model_fingerprint"] == fingerprint(model)
        assert json.loads(facts["options"]) == {"dtype": "float32", "long_side": 512}
        assert facts["radio_triton"] == radio_triton.__version__
        assert str(tmp_path) not in str(facts), "where the photos lie is nobody's business"


def test_odd_inputs(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    Image.new("RGBA", (16, 24), (255, 0, 0, 128)).save(folder / "alpha.png")
    Image.new("L", (16, 24), 9).save(folder / "grey.jpg")
    Image.new("P", (16, 24)).save(folder / "palette.gif")
    Image.fromarray(np.full((24, 16), 30000, np.uint16)).save(folder / "sixteen.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (24, 16)).save(folder / "turned.jpeg", exif=exif)
    Image.new("RGB", (1, 1)).save(folder / "pixel.png")
    Image.new("RGB", (3000, 2)).save(folder / "thread.PNG")
    assert run("encode", folder, "--out", tmp_path / "out").exit_code == 0
    grids = {
        path.name.split(".")[0]: json.loads(metadata(path)["grid"]) for path in (tmp_path / "out").iterdir()
    }
    upright = {name: [3, 2] for name in ("alpha", "grey", "palette", "sixteen", "turned")}
    assert grids == upright | {"pixel": [1, 1], "thread": [1, 64]}


def test_unreadable_files_are_reported_and_the_rest_is_encoded(photos: Path, tmp_path: Path) -> None:
    (photos / "b.png").write_bytes(b"junk")
    whole = photo(photos / "d.jpg", 64, 64).read_bytes()
    (photos / "d.jpg").write_bytes(whole[: len(whole) // 2])
    result = run("encode", photos, tmp_path / "gone.jpg", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert written(tmp_path / "out") == ["a.png.safetensors", "c.png.safetensors"]
    assert "encoded 2 images" in result.stdout
    assert "3 files could not be read" in result.stderr
    for name, reason in [("b.png", "not an image"), ("d.jpg", "truncated"), ("gone.jpg", "no such file")]:
        assert re.search(rf"{name}: .*{reason}", result.stderr)


def test_nothing_found_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for arguments in ([tmp_path], [tmp_path / "*.jpg"], [tmp_path / "gone.jpg"]):
        result = run("encode", *arguments, "--out", tmp_path / "out")
        assert result.exit_code == 2
        assert "no image found" in result.stderr
    assert not (tmp_path / "out").exists()


def test_folders_are_walked_and_patterns_expanded(tmp_path: Path) -> None:
    photo(tmp_path / "in" / "x.png")
    photo(tmp_path / "in" / "deep" / "er" / "y.JPG", format="PNG")
    photo(tmp_path / "in" / ".hidden" / "z.png")
    photo(tmp_path / "in" / "._x.png")
    photo(tmp_path / "in" / "out" / "old.png")
    (tmp_path / "in" / "notes.txt").write_text("x")
    out = tmp_path / "in" / "out"
    assert run("encode", tmp_path / "in", "--out", out).exit_code == 0
    assert written(out) == ["deep/er/y.JPG.safetensors", "old.png", "x.png.safetensors"]
    assert run("encode", tmp_path / "in" / "**" / "y*.JPG", "--out", tmp_path / "globbed").exit_code == 0
    assert written(tmp_path / "globbed") == ["y.JPG.safetensors"]
    # one file named three ways is encoded once
    result = run(
        "encode", tmp_path / "in/x.png", tmp_path / "in/*.png", tmp_path / "in", "--out", tmp_path / "o"
    )
    assert "encoded 3 images" in result.output  # x, y and, as --out is elsewhere, old


def change_content(photos: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in "abc":
        photo(photos / f"{name}.png", seed=99)
    return []


def change_model(photos: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def other(*_: object) -> RadioModel:
        model = demo_model()
        with torch.no_grad():
            model.encoder.layer[3].mlp.fc2.bias[5] += 1e-3
        return model

    monkeypatch.setattr(cli, "load_model", other)
    return []


def change_long_side(photos: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ["--long-side", "16"]


def change_dtype(photos: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ["--dtype", "bfloat16"]


def truncate_outputs(photos: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for path in (photos.parent / "out").iterdir():
        path.write_bytes(path.read_bytes()[:-7])
    return []


def test_what_is_there_is_kept(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("encode", photos, "--out", tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(RadioModel, "encode", lambda *_: pytest.fail("encoded again"))
    result = run("encode", photos, "--out", tmp_path / "out", "--max-tokens", "7")
    assert result.exit_code == 0 and "kept 3 files" in result.output and "encoded 0 images" in result.output
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times


@pytest.mark.parametrize(
    "change", [change_content, change_model, change_long_side, change_dtype, truncate_outputs]
)
def test_what_has_changed_is_encoded_again(
    change: Callable[[Path, pytest.MonkeyPatch], list[str]],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run("encode", photos, "--out", tmp_path / "out")
    options = change(photos, monkeypatch)
    result = run("encode", photos, "--out", tmp_path / "out", *options)
    assert "encoded 3 images" in result.output and "kept" not in result.output
    assert len(written(tmp_path / "out")) == 3
    assert "kept 3 files" in run("encode", photos, "--out", tmp_path / "out", *options).output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(dtype: str, photos: Path, tmp_path: Path) -> None:
    assert run("encode", photos, "--out", tmp_path, "--dtype", dtype).exit_code == 0
    assert load_file(tmp_path / "a.png.safetensors")["features"].dtype == getattr(torch, dtype)


def test_other_models_are_loaded_as_asked(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def from_pretrained(source: str, **options: object) -> RadioModel:
        asked[source] = options
        return demo_model()

    monkeypatch.setattr(RadioModel, "from_pretrained", from_pretrained)
    run("encode", photos, "--out", tmp_path / "a", "--model", "nvidia/C-RADIOv4-H", "--device", "cpu")
    run("encode", photos, "--out", tmp_path / "b", "--model", photos, "--dtype", "float16", "--device", "cpu")
    cpu = torch.device("cpu")
    assert asked["nvidia/C-RADIOv4-H"] == {"dtype": None, "device": cpu}
    assert asked[str(photos)] == {"dtype": torch.float16, "device": cpu}
    assert metadata(tmp_path / "a" / "a.png.safetensors")["model"] == "nvidia/C-RADIOv4-H"
    assert metadata(tmp_path / "b" / "a.png.safetensors")["model"] == "photos"


def sources(out: Path) -> dict[str, str]:
    return {name: metadata(out / name)["source_sha256"] for name in written(out)}


def test_equal_names_do_not_overwrite_one_another(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = photo(tmp_path / "a" / "x.png", seed=1)
    second = photo(tmp_path / "b" / "x.png", seed=2)
    photo(tmp_path / "a" / "x.bmp", seed=3)
    assert run("encode", first.parent, second.parent, "--out", out).exit_code == 0
    marked, *plain = written(out)
    assert plain == ["x.bmp.safetensors", "x.png.safetensors"]
    assert re.fullmatch(r"x-[0-9a-f]{8}\.png\.safetensors", marked)
    kept = sources(out)
    assert len(set(kept.values())) == 3
    # in another order, and one at a time, everything is found again
    for arguments in ([second.parent, first.parent], [second], [first]):
        result = run("encode", *arguments, "--out", out)
        assert "encoded 0 images" in result.output
    assert sources(out) == kept


def test_a_later_run_does_not_overwrite_another_files_features(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("encode", photo(tmp_path / "a" / "x.png", seed=1), "--out", out)
    before = sources(out)
    run("encode", photo(tmp_path / "b" / "x.png", seed=2), "--out", out)
    assert len(sources(out)) == 2 and sources(out).items() >= before.items()
    # a photo that only moved is the same photo
    (tmp_path / "a").rename(tmp_path / "c")
    assert "kept 1 file" in run("encode", tmp_path / "c", "--out", out).output


def test_calls_stay_within_the_budget(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []
    encode = RadioModel.encode

    def counted(self: RadioModel, items: list[Tensor]) -> list:
        calls.append([item.shape[1] * item.shape[2] // 64 + 4 for item in items])
        return encode(self, items)

    monkeypatch.setattr(RadioModel, "encode", counted)
    run("encode", photos, "--out", tmp_path / "roomy")
    run("encode", photos, "--out", tmp_path / "exact", "--max-tokens", 27)
    run("encode", photos, "--out", tmp_path / "tight", "--max-tokens", 18)
    assert calls == [[8, 19, 12], [8, 19], [12], [8], [19], [12]]
    assert len(written(tmp_path / "tight")) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError("disk full")])
def test_an_interrupted_run_leaves_whole_files_and_goes_on(
    error: type[BaseException], photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        seen = []

        def write_bytes(path: Path, data: bytes) -> int:
            seen.append(path)
            with path.open("wb") as file:
                file.write(data if len(seen) == 1 else data[:50])
            if len(seen) == 2:
                raise error
            return len(data)

        patch.setattr(Path, "write_bytes", write_bytes)
        result = CliRunner().invoke(cli.main, ["encode", str(photos), "--out", str(out)])
    assert result.exit_code == 1 and len(seen) == 2
    assert written(out) == ["a.png.safetensors"]
    assert load_file(out / "a.png.safetensors")["features"].shape == (4, 64)
    result = run("encode", photos, "--out", out)
    assert "encoded 2 images" in result.output and "kept 1 file" in result.output


def test_a_full_disk_gets_a_sentence(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("encode", photos, "--out", tmp_path / "file" / "out")
    assert result.exit_code == 1 and result.stderr.startswith("Error: ")


@pytest.mark.parametrize(
    ("option", "value"), [("--model", "no/such/folder/here"), ("--device", "gpu"), ("--max-tokens", "0")]
)
def test_bad_options_are_usage_errors(option: str, value: str, photos: Path, tmp_path: Path) -> None:
    result = run("encode", photos, "--out", tmp_path / "out", option, value)
    assert result.exit_code == 2 and option in result.stderr
    assert not (tmp_path / "out").exists()


def test_by_budget_keeps_order_and_lets_the_large_go_alone() -> None:
    assert list(by_budget([3, 9, 1, 2, 2, 30, 1], lambda n: n, 5)) == [[3], [9], [1, 2, 2], [30], [1]]
    assert list(by_budget([], lambda n: n, 5)) == []


def test_prefetch_keeps_order_and_stays_near() -> None:
    taken: list[int] = []

    def numbers():
        for i in range(100):
            taken.append(i)
            yield i

    results = prefetch(lambda n: n * n, numbers(), workers=2)
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    assert len(taken) <= 8
    assert list(results) == [n * n for n in range(3, 100)]


def test_fingerprint_sees_every_weight_and_the_config() -> None:
    model = demo_model()
    assert fingerprint(model) == fingerprint(demo_model())
    prints = {fingerprint(model), fingerprint(demo_model(dtype=torch.bfloat16))}
    for tensor in list(model.state_dict().values())[:8]:
        if tensor.is_floating_point():
            tensor.view(-1)[-1] += 1e-3
            prints.add(fingerprint(model))
    shifted = RadioModel(model.config.replace(layer_norm_eps=1e-5))
    shifted.load_state_dict(model.state_dict())
    prints.add(fingerprint(shifted))
    assert len(prints) >= 9


def test_viz_draws_encoded_files(photos: Path, tmp_path: Path) -> None:
    run("encode", photos, "--out", tmp_path / "out")
    (tmp_path / "out" / "broken.safetensors").write_bytes(b"junk")
    result = run("viz", tmp_path / "out", "--out", tmp_path / "pictures")
    assert (
        result.exit_code == 1 and "drew 3 pictures" in result.stdout and "broken.safetensors" in result.stderr
    )
    assert written(tmp_path / "pictures") == ["a.png.png", "b.png.png", "c.png.png"]
    with Image.open(tmp_path / "pictures" / "b.png.png") as image:
        assert image.size == (40, 24) and image.mode == "RGB"
        assert len(image.getcolors()) > 5
    assert run("viz", tmp_path / "nowhere", "--out", tmp_path / "pictures").exit_code == 2


def test_joint_colours_mean_the_same_everywhere(tmp_path: Path) -> None:
    first, second = torch.randn(16, 8), torch.randn(16, 8) * 4
    second[5] = first[3]
    facts = {"grid": "[4, 4]", "encoded_size": "[32, 32]"}
    write_features(tmp_path / "in" / "a.safetensors", {"features": first}, facts)
    write_features(tmp_path / "in" / "b.safetensors", {"features": second}, facts)
    assert run("viz", tmp_path / "in", "--joint", "--out", tmp_path / "joint").exit_code == 0
    assert run("viz", tmp_path / "in", "--out", tmp_path / "each").exit_code == 0

    def same(folder: str) -> bool:
        a, b = (np.asarray(Image.open(tmp_path / folder / f"{name}.png")) for name in "ab")
        return bool((a[0, 31] == b[8, 8]).all())

    assert same("joint") and not same("each")
    write_features(tmp_path / "in" / "c.safetensors", {"features": torch.randn(16, 9)}, facts)
    result = run("viz", tmp_path / "in", "--joint", "--out", tmp_path / "joint")
    assert result.exit_code == 1 and "widths [8, 9]" in result.stderr


def test_demo(tmp_path: Path) -> None:
    result = run("demo", "--out", tmp_path)
    assert result.exit_code == 0
    items = read_features(tmp_path / "features.safetensors")
    names = [item.name for item in items]
    assert names[-1] == "clip" and len(names) >= 5 and "panorama" in names
    assert written(tmp_path) == sorted(
        [f"{name}.png" for name in names] + ["demo.png", "features.safetensors"]
    )
    tensors = load_file(tmp_path / "features.safetensors")
    for item in items:
        *frames, h, w = item.grid
        assert item.features.shape == (*frames, h * w, 64)
        assert tensors[f"{item.name}.summary"].shape == (*frames, 128)
        with Image.open(tmp_path / f"{item.name}.png") as image:
            assert image.size == (item.size[1] * (frames or [1])[0], item.size[0])
    with Image.open(tmp_path / "demo.png") as sheet:
        assert sheet.size[0] > 1000 and sheet.size[1] > len(names) * 240
    difference = re.search(r"packed and alone differ by at most (\S+);", result.output)
    assert difference and float(difference[1]) < 1e-3
    assert f"encoded {len(names) - 1} photos" in result.output and "images/s" in result.output
    assert result.output.rstrip().endswith("radio-triton encode YOUR_PHOTOS --out features")


def test_doctor_names_versions_and_every_op() -> None:
    result = run("doctor")
    assert result.exit_code == 0
    assert torch.__version__ in result.output and radio_triton.__version__ in result.output
    for op in OPS:
        assert re.search(
            rf"^{op} +eager \(PyTorch\) +(eager \(PyTorch\)|Triton)$", result.output, re.MULTILINE
        )
