"""The examples run, stay short, and do what they say."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import teachers
from radio_triton import available_adaptors
from teachers import write_hub
from test_text import fake_open_clip

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GOLDEN = ROOT / "tests" / "data" / "torchhub-adaptors" / "checkpoint.pth.tar"
PHOTO = ROOT / "radio_triton" / "samples" / "cat.jpg"


def run(name: str, *arguments: object) -> Any:
    return runpy.run_path(str(ROOT / "examples" / name))["main"]([str(argument) for argument in arguments])


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_short_and_documented(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") < 60
    assert f"python examples/{path.name}" in text.split('"""')[1]


def test_dense_features(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("dense_features.py") > 0.85
    assert "3 maps such as (64, 8, 12)" in capsys.readouterr().out


def test_dense_features_of_an_adaptor(capsys: pytest.CaptureFixture[str]) -> None:
    """Random weights, so only that the finer map learns more than a guess would."""
    assert run("dense_features.py", GOLDEN, "--adaptor", "sam", "--steps", 40) > 0.6
    assert "3 maps such as (32, 16, 24)" in capsys.readouterr().out


def test_windowed(capsys: pytest.CaptureFixture[str]) -> None:
    run("windowed.py")
    assert "instead of" in capsys.readouterr().out


def test_zero_shot_is_skipped_without_a_text_tower(capsys: pytest.CaptureFixture[str]) -> None:
    assert available_adaptors(GOLDEN) == ["clip", "sam"]
    run("zero_shot.py", GOLDEN, PHOTO, "cat", "dog", "--adaptor", "clip")
    assert capsys.readouterr().out.startswith("skipped: adaptor clip has no text tower")
    run("zero_shot.py", GOLDEN, PHOTO, "cat", "--adaptor", "dino_v3")
    assert "has no adaptor 'dino_v3'" in capsys.readouterr().out
    run("zero_shot.py", ROOT / "absent.pth.tar", PHOTO, "cat")
    assert "absent.pth.tar does not exist" in capsys.readouterr().out


def test_zero_shot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tower that gives every class its own axis: the scores are the summary's, in falling order."""
    fake_open_clip(monkeypatch, [])
    axes = {f"a photo of a {name}": axis for axis, name in enumerate(("cat", "dog", "car"))}
    import open_clip

    tower = open_clip.create_model_from_pretrained("x", pretrained="y", return_transform=False)
    monkeypatch.setattr(type(tower), "encode_text", lambda self, ids: torch.eye(10)[ids[:, 0]])
    monkeypatch.setattr(
        open_clip, "get_tokenizer", lambda name: lambda texts: torch.tensor([[axes[t]] for t in texts])
    )
    path = write_hub(tmp_path, teachers=teachers.teachers(type="open_clip", model="x"))
    Image.open(PHOTO).resize((30, 21)).save(tmp_path / "photo.png")
    run("zero_shot.py", path, tmp_path / "photo.png", "cat", "dog", "car")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {name for _, name in lines} == {"cat", "dog", "car"}
    assert [float(score) for score, _ in lines] == sorted((float(s) for s, _ in lines), reverse=True)
