"""Where checkpoints are found, options, values that are not finite, and what loading costs."""

import json
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import (
    LAYOUTS,
    State,
    args_of,
    gelu_model,
    reference,
    remote_config,
    state_of,
    torch_hub,
    write_folder,
    write_pth,
    write_shards,
)
from loading import BLOCK, refused, same
from radio_triton import RadioModel
from radio_triton.checkpoint import CheckpointError, describe, open_weights


@pytest.fixture(scope="module")
def model() -> RadioModel:
    return gelu_model()


@pytest.fixture
def state(model: RadioModel) -> State:
    """The model under the names of a remote-code file."""
    return reference(state_of(model), "radio_model.model.", "radio_model.")


def test_folder_file_and_string(model: RadioModel, tmp_path: Path) -> None:
    folder = LAYOUTS["remote"][0](model, tmp_path)
    for source in (folder, str(folder), folder / "model.safetensors"):
        assert same(RadioModel.from_pretrained(source), model)
    index = write_shards(
        tmp_path / "shards", reference(state_of(model), "radio_model.model.", "radio_model."), {}
    )
    (index / "config.json").write_text(json.dumps(remote_config(model.config)))
    assert same(RadioModel.from_pretrained(index / "model.safetensors.index.json"), model)


@pytest.mark.parametrize(
    "name", ["weights.pth.tar", "weights.pth", "weights.pt", "pytorch_model.bin", "other.safetensors"]
)
def test_the_only_candidate_of_a_folder(name: str, model: RadioModel, tmp_path: Path) -> None:
    source = LAYOUTS["remote" if name.endswith("safetensors") else "hub"][0](model, tmp_path)
    (source if source.is_file() else source / "model.safetensors").rename(tmp_path / name)
    assert same(RadioModel.from_pretrained(tmp_path), model)


def test_bare_state_dict_beside_a_config(model: RadioModel, tmp_path: Path) -> None:
    torch.save(torch_hub(state_of(model)), tmp_path / "weights.pt")
    (tmp_path / "config.json").write_text(json.dumps(remote_config(model.config)))
    assert same(RadioModel.from_pretrained(tmp_path), model)


def test_several_candidates(model: RadioModel, tmp_path: Path) -> None:
    path = LAYOUTS["hub"][0](model, tmp_path)
    (tmp_path / "last.pth.tar").write_bytes(path.read_bytes())
    refused(tmp_path, r"2 files that may be the weights \(checkpoint.pth.tar, last.pth.tar\): pass one")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no weights: expected model.safetensors"):
        RadioModel.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"does not exist: pass a folder .* or a Hugging Face id"):
        RadioModel.from_pretrained(tmp_path / "absent")


def hub_cache(root: Path, files: Path, hub_id: str = "nvidia/tiny") -> None:
    """A repository as huggingface_hub keeps it, under HF_HUB_CACHE."""
    repository = root / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for file in files.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize("layout", ["remote", "sharded", "sharded-vlm"])
def test_hub_id_from_the_cache(
    layout: str, model: RadioModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_cache(tmp_path / "cache", LAYOUTS[layout][0](model, tmp_path / "files"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    loaded = RadioModel.from_pretrained("nvidia/tiny", local_files_only=True)
    assert same(loaded, model)
    refused("nvidia/tiny", "pass the path of a folder or file", local_files_only=True, revision="v2")


class FakeHub:
    """huggingface_hub's download over a folder, which notes what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[tuple[str, str | None]]()

    def __call__(self, repo: str, name: str, *, revision: str | None, local_files_only: bool) -> str:
        from huggingface_hub.errors import EntryNotFoundError

        assert repo == "nvidia/tiny" and not local_files_only
        self.asked.append((name, revision))
        if not (self.folder / name).exists():
            raise EntryNotFoundError(f"no {name}")
        return str(self.folder / name)


def test_hub_id_fetches_only_what_the_tower_needs(
    model: RadioModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = reference(state_of(model), "vision_model.radio_model.model.", "vision_model.radio_model.")
    language = {"language_model.layers.0.weight": torch.zeros(4, 4)}
    folder = write_folder(tmp_path, {}, {"vision_config": remote_config(model.config)})
    (folder / "model.safetensors").unlink()
    for name, part in (("a.safetensors", tower), ("b.safetensors", language)):
        save_file({key: x.contiguous() for key, x in part.items()}, folder / name)
    table = dict.fromkeys(tower, "a.safetensors") | dict.fromkeys(language, "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    hub = FakeHub(folder)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    loaded = RadioModel.from_pretrained("nvidia/tiny", revision="v1")
    assert same(loaded, model)
    names = ["config.json", "model.safetensors", "model.safetensors.index.json", "a.safetensors"]
    assert hub.asked == [(name, "v1") for name in names]
    assert loaded.load_report.ignored == {"language_model.layers.0.weight": "outside the tower"}


def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    refused(
        "nvidia/C-RADIOv4-H", r"no file or folder here.*no route to host.*pass the path of a folder or file"
    )


def test_importing_loads_no_hub() -> None:
    code = "import sys, radio_triton.checkpoint; assert 'huggingface_hub' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(value: float, model: RadioModel, state: State, tmp_path: Path) -> None:
    state[f"{BLOCK}attn.proj.weight"][3, 4] = value
    folder = write_folder(tmp_path, state, remote_config(model.config))
    with pytest.warns(
        UserWarning, match=f"1 tensors hold NaN or infinity as torch.float32: {BLOCK}attn.proj.weight"
    ) as seen:
        RadioModel.from_pretrained(folder)
    assert seen[0].filename == __file__
    refused(folder, "hold NaN or infinity", strict_finite=True)
    fresh = RadioModel(model.config)
    with pytest.warns(UserWarning, match="hold NaN or infinity") as seen:
        fresh.load_weights(iter(state.items()))
    assert seen[0].filename == __file__
    with pytest.raises(CheckpointError, match="hold NaN or infinity"):
        fresh.load_weights(iter(state.items()), strict_finite=True)


def test_weights_too_large_for_half_precision(model: RadioModel, state: State, tmp_path: Path) -> None:
    state[f"{BLOCK}mlp.fc1.weight"][0, 0] = 1e5
    folder = write_folder(tmp_path, state, remote_config(model.config))
    refused(folder, f"as torch.float16: {BLOCK}mlp.fc1.weight", dtype=torch.float16, strict_finite=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RadioModel.from_pretrained(folder, dtype=torch.bfloat16)


def test_options(model: RadioModel, tmp_path: Path) -> None:
    folder = LAYOUTS["remote"][0](model, tmp_path)
    with pytest.raises(ValueError, match="no field 'pos_align_corner'; did you mean 'pos_align_corners'"):
        RadioModel.from_pretrained(folder, pos_align_corner=True)
    with pytest.raises(TypeError, match=r"dtype must be a floating point dtype .*, got 'bfloat16'"):
        RadioModel.from_pretrained(folder, dtype="bfloat16")
    assert all(p.requires_grad for p in RadioModel.from_pretrained(folder, trainable=True).parameters())
    bad = write_folder(tmp_path / "bad", state_of(model), remote_config(model.config))
    text = (bad / "config.json").read_text().replace('"float32"', '"float99"')
    (bad / "config.json").write_text(text)
    refused(bad, "args.dtype is 'float99': expected float32")


def test_describe_reads_no_parameter(
    model: RadioModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = open_weights(LAYOUTS["hub-heads"][0](model, tmp_path))
    read: list[str] = []
    monkeypatch.setattr(type(weights), "read", lambda self, key: read.append(key) or self.entries[key].read())
    tower = describe(weights)
    assert tower.config == model.config
    assert set(tower.adaptors) == {"clip", "sam"}
    assert (tower.dtype, tower.unknown, weights.metadata["epoch"]) == (torch.float32, (), "3")
    assert set(read) == {"input_conditioner.norm_mean", "input_conditioner.norm_std"}


MEASURE = textwrap.dedent("""
    import os, sys, threading
    import torch
    from radio_triton import RadioModel

    def anonymous():
        return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) * 1024

    def measure(path, dtype):
        RadioModel.from_pretrained(path, num_hidden_layers=1)
        base, peak, done = anonymous(), [0], threading.Event()

        def watch():
            while not done.wait(0.001):
                peak[0] = max(peak[0], anonymous())

        watcher = threading.Thread(target=watch)
        watcher.start()
        model = RadioModel.from_pretrained(path, dtype=dtype)
        peak[0] = max(peak[0], anonymous())
        done.set()
        watcher.join()
        return (peak[0] - base) / sum(p.nbytes for p in model.parameters())

    torch.set_num_threads(1)
    for path in sys.argv[1:]:
        for dtype in (torch.float32, torch.bfloat16):
            # a process of its own starts from the memory of the imports
            if os.fork() == 0:
                print(path.rpartition("/")[2], dtype, measure(path, dtype), flush=True)
                os._exit(0)
            os.wait()
""")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory(tmp_path: Path) -> None:
    """Private memory above what the imports take is that of the parameters, with at most a tenth more."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048, "num_hidden_layers": 16}
    model = gelu_model(**sizes)
    config, state = model.config, torch_hub(state_of(model))
    half = {name: tensor.bfloat16() for name, tensor in state.items()}
    paths = [
        write_folder(tmp_path / "file-float32", state, remote_config(config, dtype=None)),
        write_folder(tmp_path / "file-bfloat16", half, remote_config(config, dtype=None)),
        write_pth(tmp_path, half, args_of(config, dtype=None)),
    ]
    command = [sys.executable, "-c", MEASURE, *map(str, paths)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    ratios = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert len(ratios) == 6
    assert all(0.9 < ratio <= 1.1 for ratio in ratios.values()), ratios
