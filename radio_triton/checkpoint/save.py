"""Save a model: config.json, model.safetensors and a model card, written whole or not at all."""

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..config import RadioConfig
from .card import Licence, find_licence, is_ours, write_card
from .forms import FORMS, cannot_hold, form_config, form_tensors
from .heads import Beside, beside, written_beside
from .keys import STATISTICS

if TYPE_CHECKING:
    from ..model import RadioModel

log = logging.getLogger(__name__)

_SENTENCES = {
    "native": "Transformers' RadioModel.from_pretrained reads this folder, and radio_triton does.",
    "legacy": "The names are those of NVIDIA's remote-code class, whose Python files are not in this folder; "
    "radio_triton reads it without them.",
    "fused": "The weights are in radio_triton's own form, with the parameter names of vLLM's RadioModel; "
    "radio_triton reads it.",
}
_OTHER_WEIGHTS = ("*.safetensors", "*.index.json", "*.pth", "*.pth.tar", "*.pt", "*.bin")


def save_pretrained(model: "RadioModel", folder: str | os.PathLike, *, license: str | None = None) -> str:
    """Write a folder that Transformers' RadioModel reads, where it can hold the architecture; else in our own
    form.

    The folder's model normalises pixels itself, also after `make_preprocessor_external` of this one.
    license: of the weights, for the model card; None is what the model's source says, if it is still there.
    Returns (and, for our own form, logs) the sentence that says who can read the folder. Other files in it
    stay, and so does a README.md that another wrote. ValueError where the folder holds other weights, or
    where the model's parameters are not those of its config; OSError from the disk. After an error what was
    there is as it was.
    """
    given = Licence(license) if license else None
    with staged(Path(folder)) as temporary:
        sentence = write_folder(model, temporary, licence=given or licence_of_source(model))
    if "own form" in sentence:
        log.warning("%s: %s", folder, sentence)
    return sentence


def licence_of_source(model: "RadioModel") -> Licence | None:
    """What the files that a model was loaded from say, if they are still there."""
    source = Path(model.load_report.source) if model.load_report else None
    return find_licence(source) if source is not None and source.exists() else None


def write_folder(
    model: "RadioModel",
    folder: Path,
    *,
    form: str | None = None,
    args: Mapping[str, Any] | None = None,
    licence: Licence | None = None,
) -> str:
    """Write the files into an empty folder; returns the sentence that says who can read them.

    form: one of FORMS, a ValueError where it cannot hold the model; None is native where that can, else
    fused. args: the source's, for the legacy form.
    """
    state, bare = plain_state(model)
    # the norms' weights have been divided when the model was loaded
    whole = model.config.replace(scaled_layer_norm=False)
    config = whole.replace(num_dummy_heads=0) if bare else whole
    has = beside(model)
    chosen, written, lost = choose_form(config, model.dtype, form, args, has)
    if chosen == "fused":
        # the file has no dummy heads; loading it adds them again
        written = form_config("fused", whole, model.dtype)
    written |= written_beside(has, config.hidden_size)
    sentence = _SENTENCES[chosen]
    if lost:
        sentence = f"Transformers' RadioModel cannot hold {listed(lost)}. {sentence}"
    (folder / "config.json").write_text(json.dumps(written, indent=2, default=str) + "\n", encoding="utf-8")
    tensors = {name: x.contiguous() for name, x in form_tensors(chosen, state.items(), written)}
    metadata = {"format": "pt", **(licence.fields() if licence else {})}
    save_file(tensors, folder / "model.safetensors", metadata)
    # save_file makes its file private to the user
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    if licence is not None and licence.file is not None:
        shutil.copyfile(licence.file, folder / licence.file.name)
    count = sum(x.numel() for name, x in state.items() if name not in STATISTICS)
    size = f"{count:,} in {str(model.dtype).removeprefix('torch.')}"
    write_card(folder / "README.md", model.config, size, sentence, licence, transformers=chosen == "native")
    return sentence


def choose_form(
    config: RadioConfig,
    dtype: torch.dtype,
    form: str | None,
    args: Mapping[str, Any] | None,
    has: Beside | None = None,
) -> tuple[str, dict[str, Any], list[str]]:
    """The form, its config.json, and what of the config made native impossible where none was asked for."""
    if form is not None and form not in FORMS:
        raise ValueError(f"form is one of {', '.join(FORMS)}, got {form!r}")
    wanted = form or "native"
    written = form_config(wanted, config, dtype, args)
    lost = [] if wanted == "fused" else cannot_hold(config, written)
    lost += (has or Beside()).lost_in(wanted)
    if config.num_dummy_heads and wanted != "fused":
        lost.append("dummy heads that are not zero")
    if lost and form is not None:
        holder = "Transformers' RadioModel" if form == "native" else "NVIDIA's remote-code class"
        raise ValueError(f"{holder} cannot hold {listed(lost)}: the fused form holds every model")
    return ("fused" if lost else wanted), written, lost


def listed(things: list[str]) -> str:
    """One thing alone, or all with "and" before the last."""
    return " and ".join([", ".join(things[:-1]), things[-1]] if things[1:] else things)


def plain_state(model: "RadioModel") -> tuple[dict[str, Tensor], bool]:
    """The state on the CPU, without dummy heads where these are zero, and whether they were left out."""
    from ..model import RadioModel

    if any(x.is_meta for x in model.state_dict().values()):
        raise ValueError(
            "the model is on the meta device and has no weights to save: load or initialise it first"
        )
    state = {name.replace("_orig_mod.", ""): x.detach() for name, x in model.state_dict().items()}
    plain = RadioModel(model.config, device="meta")
    beside(model).attach(plain)
    expected = set(plain.state_dict())
    if state.keys() != expected:
        odd = sorted(state.keys() ^ expected)
        raise ValueError(
            f"the model's parameters are not those of its config ({len(odd)} differ, such as {odd[0]}): "
            "merge adapters and undo quantisation before saving"
        )
    parts = {name: _without_dummy_heads(name, x, model.config) for name, x in state.items()}
    padding = (rest for name, (_, rest) in parts.items() if not name.endswith("_norm.weight"))
    bare = model.config.num_dummy_heads > 0 and not any(bool(x.any()) for x in padding)
    return {name: (parts[name][0] if bare else x).cpu() for name, x in state.items()}, bare


def _without_dummy_heads(name: str, x: Tensor, config: RadioConfig) -> tuple[Tensor, Tensor]:
    """A tensor's columns of real heads, and those of dummy heads, which are empty for most tensors."""
    width = config.hidden_size
    if ".attention.qkv." in name:
        rows = x.unflatten(0, (3, -1))
        return rows[:, :width].flatten(0, 1), rows[:, width:]
    if ".attention." in name and not name.endswith(".bias"):
        return x[..., :width], x[..., width:]
    return x, x[:0]


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, which becomes it, or whose files move into it, if the block
    succeeds.
    """
    folder = folder.resolve()
    _check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.tmp"
    temporary.mkdir()
    try:
        yield temporary
        if folder.exists():
            _move_files(temporary, folder)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_target(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: a model is saved into a folder")
    others = {path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern)} - {
        "model.safetensors"
    }
    if others:
        raise ValueError(
            f"{folder} holds other weights ({', '.join(sorted(others)[:4])}): choose another folder"
        )


def _move_files(new: Path, folder: Path) -> None:
    """Move each file into a folder; where that fails midway, put back what was there."""
    names = sorted(path.name for path in new.iterdir())
    if (folder / "README.md").exists() and not is_ours(folder / "README.md"):
        names.remove("README.md")
    old = new / "old"
    old.mkdir()
    kept = [name for name in names if (folder / name).exists()]
    try:
        for name in kept:
            os.replace(folder / name, old / name)
        for name in names:
            os.replace(new / name, folder / name)
    except BaseException:
        for name in names:
            if (old / name).exists():
                os.replace(old / name, folder / name)
            elif name not in kept:
                (folder / name).unlink(missing_ok=True)
        raise
