"""Text towers: SigLIP2 by Transformers on a tiny random model, open_clip by a stand-in, and what is refused."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import teachers
from helpers import rel_error
from radio_triton import RadioModel
from radio_triton.integrations.text import canonicalize, text_tower
from teachers import write_hub

LETTERS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *"abcdefghijklmnopqrstuvwxyz"]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("A photo_of  a CAT.", "a photo of a cat"),
        ("\tnew\nline\u00a0and  tab ", "new line and tab"),
        ("it's #1: (good)!", "its 1 good"),
        ("ÉCLAIR — naïve", "éclair — naïve"),
        ("...", ""),
        ("_", ""),
    ],
)
def test_canonicalize(text: str, plain: str) -> None:
    assert canonicalize(text) == plain == canonicalize(plain)


@pytest.fixture(scope="module", params=["siglip", "siglip2"])
def siglip(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, nn.Module]:
    """A random tower on disk, in the class of fixed sizes and in that of NaFlex, and the whole model."""
    import transformers

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": len(LETTERS), "projection_size": 10, "pad_token_id": 0}
    text |= {"bos_token_id": 1, "eos_token_id": 1}
    prefix = {"siglip": "Siglip", "siglip2": "Siglip2"}[request.param]
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=sizes)
    model = getattr(transformers, f"{prefix}Model")(config).eval()
    model.save_pretrained(folder)
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)}
    transformers.Siglip2Tokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)
    return folder, model


def with_teacher(folder: Path, **teacher: Any) -> RadioModel:
    path = write_hub(folder, teachers=teachers.teachers(**teacher))
    options = {
        "video_temporal_patch_size": 2,
        "num_attention_heads": 2,
        "adaptor_names": ["siglip2-g", "clip"],
    }
    return RadioModel.from_pretrained(path, **options)


def test_siglip2_encodes_canonical_text(siglip: tuple[Path, nn.Module], tmp_path: Path) -> None:
    folder, whole = siglip
    model = with_teacher(tmp_path, type="siglip2", model=str(folder))
    adaptor, before = model.adaptors["siglip2-g"], set(model.state_dict())
    ids = adaptor.tokenizer(["A photo of_a CAT!", "a dog"])
    assert ids.shape == (2, 64)
    letters = ["".join(LETTERS[i] for i in row if i > 4) for row in ids]
    assert letters == ["a▁photo▁of▁a▁cat", "a▁dog"]
    # padding comes last
    assert ids[1, 0] > 0 and ids[1, -1] == 0
    want = whole.text_model(input_ids=ids).pooler_output
    got = adaptor.encode_text(["a photo of a cat", "A dog."])
    assert got.dtype == torch.float32 and not got.requires_grad
    assert rel_error(got, want) < 1e-6
    assert rel_error(adaptor.encode_text(ids), want) < 1e-6
    unit = adaptor.encode_text("a dog", normalize=True)
    assert rel_error(unit, nn.functional.normalize(want[1:], dim=-1)) < 1e-6
    # the tower is no part of the model's state
    assert set(model.state_dict()) == before and adaptor.text is adaptor.text


class FakeClip(nn.Module):
    """Stands in for open_clip's model: texts are their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.arange(1.0, 5.0))

    def encode_text(self, ids: Tensor) -> Tensor:
        return ids.double() * self.weight


def fake_open_clip(monkeypatch: pytest.MonkeyPatch, made: list[tuple[str, str]]) -> None:
    module = ModuleType("open_clip")

    def create(name: str, pretrained: str, return_transform: bool) -> FakeClip:
        if pretrained == "absent":
            raise RuntimeError("no such weights")
        assert not return_transform
        made.append((name, pretrained))
        return FakeClip()

    def tokenizer(texts: list[str]) -> Tensor:
        assert isinstance(texts, list)
        return torch.tensor([[len(text)] for text in texts])

    module.create_model_from_pretrained = create
    module.get_tokenizer = lambda name: tokenizer
    monkeypatch.setitem(sys.modules, "open_clip", module)


def test_open_clip_is_loaded_once_and_on_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[tuple[str, str]] = []
    fake_open_clip(monkeypatch, made)
    teacher = {"type": "open_clip", "model": "ViT-H-14", "pretrained": "dfn5b"}
    adaptor = with_teacher(tmp_path, **teacher).adaptors["siglip2-g"]
    assert made == []
    assert adaptor.encode_text(["abc", "d"]).tolist() == [[3, 6, 9, 12], [1, 2, 3, 4]]
    assert adaptor.encode_text("abc").tolist() == [[3, 6, 9, 12]]
    assert adaptor.encode_text(adaptor.tokenizer("abc"), normalize=True).norm() == pytest.approx(1)
    assert made == [("ViT-H-14", "dfn5b")]
    assert adaptor.text.model.visual is None and not adaptor.text.model.weight.requires_grad


def test_what_has_no_tower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = with_teacher(tmp_path, type="siglip2", model=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"adaptor clip has no text tower that is known: .*of type 'clip'"):
        model.adaptors["clip"].encode_text("a cat")
    with pytest.raises(ValueError, match="the checkpoint does not say what taught it"):
        text_tower("sam", {})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"the text tower .*nothing could not be loaded by Transformers"):
        model.adaptors["siglip2-g"].encode_text("a cat")
    fake_open_clip(monkeypatch, [])
    with pytest.raises(
        OSError, match=r"ViT-B-32 \(absent\) could not be loaded by open_clip: no such weights"
    ):
        text_tower("clip", {"type": "open_clip", "model": "ViT-B-32", "pretrained": "absent"})
    for kind, library in (("open_clip", "open_clip"), ("siglip2", "transformers")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ImportError, match=rf"needs {library}: pip install radio-triton\[text\]"):
            text_tower("clip", {"type": kind, "model": "x"})


def test_vision_heads_need_no_text_library(tmp_path: Path) -> None:
    path = write_hub(tmp_path, teachers=teachers.teachers(type="open_clip", model="x"))
    code = (
        "import sys\nsys.modules.update(open_clip=None, transformers=None)\nfrom radio_triton import RadioModel\n"
        f"m = RadioModel.from_pretrained({str(path)!r}, adaptor_names='siglip2-g', video_temporal_patch_size=2, "
        "num_attention_heads=2)\nimport torch\nprint(*m(torch.rand(1, 3, 8, 8))['siglip2-g'].summary.shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "1 10", done.stderr
