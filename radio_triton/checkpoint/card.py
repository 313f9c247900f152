"""The licence of weights, as their source states it, and the model card that goes with saved ones."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..config import RadioConfig
from .keys import CheckpointError

TAG = "radio_triton"
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Licence:
    """`id` as the Hub has it ("apache-2.0", "other"), with the name and link that "other" needs; `where` it
    was found.
    """

    id: str
    name: str | None = None
    link: str | None = None
    where: str = "given by the caller"
    file: Path | None = None

    def __str__(self) -> str:
        more = ", ".join(text for text in (self.name, self.link) if text)
        return f"{self.id} ({more})" if more else self.id

    def fields(self) -> dict[str, str]:
        """For a card's front matter and a file's metadata."""
        pairs = {"license": self.id, "license_name": self.name, "license_link": self.link}
        return {key: value for key, value in pairs.items() if value}


def find_licence(source: Path, metadata: Mapping[str, str] | None = None) -> Licence | None:
    """What a folder's README.md, a safetensors file's metadata, or a LICENSE file says; None where nothing
    does.

    source: a model's folder, or a file in one. Beside a file without config.json the README.md may be
    anyone's.
    """
    folder = source if source.is_dir() else source.parent
    whole = source.is_dir() or (folder / "config.json").exists()
    files = sorted(path for path in folder.glob("LICEN[CS]E*") if path.is_file()) if whole else []
    file = files[0] if files else None
    facts = front_matter(folder / "README.md") if whole else {}
    for where, found in (("README.md", facts), ("metadata of the safetensors file", metadata or {})):
        if found.get("license", "unknown") != "unknown":
            return Licence(
                found["license"], found.get("license_name"), found.get("license_link"), where, file
            )
    if file is None:
        return None
    lines = (line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    title = next((line for line in lines if line), "")[:100]
    return Licence("other", title or None, file.name, file.name, file)


def fetch_licence(
    source: str | os.PathLike, revision: str | None = None, local_files_only: bool = False
) -> None:
    """Of a hub id, bring README.md and LICENSE beside the weights, where it has them."""
    if Path(source).exists():
        return
    from .hub import Repository

    repository = Repository(os.fspath(source), revision, local_files_only)
    for name in ("README.md", "LICENSE"):
        # what cannot be had leaves the licence unknown
        with suppress(CheckpointError):
            repository.file(name)


def front_matter(card: Path) -> dict[str, str]:
    """What stands between the `---` lines of a model card, a list as one string; {} where nothing does."""
    if not card.is_file():
        return {}
    match = _FRONT_MATTER.match(card.read_text(encoding="utf-8", errors="replace"))
    if match is None:
        return {}
    pairs = re.findall(r"^(\w+):[ \t]*(.*(?:\n[ \t]*- .*)*)", match[1], re.MULTILINE)
    return {key: " ".join(value.partition(" #")[0].split()).lstrip("- ").strip("\"'") for key, value in pairs}


def is_ours(card: Path) -> bool:
    """Whether a README.md is a card that `write_card` wrote."""
    return TAG in front_matter(card).get("tags", "").split()


def write_card(
    path: Path, config: RadioConfig, size: str, sentence: str, licence: Licence | None, transformers: bool
) -> None:
    """Write a README.md: facts, licence, use. `size`: how many parameters; `sentence`: who can read them."""
    fields = licence.fields() if licence else {"license": "unknown"}
    head = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]
    library = "transformers" if transformers else TAG
    head += [
        f"library_name: {library}",
        "pipeline_tag: image-feature-extraction",
        "tags:",
        "- radio",
        f"- {TAG}",
    ]
    path.write_text(
        "\n".join(["---", *head, "---", *_body(config, size, sentence, licence)]),
        encoding="utf-8",
    )


def _body(config: RadioConfig, size: str, sentence: str, licence: Licence | None) -> list[str]:
    (rows, columns), summary = config.max_resolution, config.summary_size
    said = (
        f"{licence} ({licence.where})."
        if licence
        else "Not known: neither whoever saved these weights nor the file they came from named one. Find it "
        "before you use or share them."
    )
    return [
        "", "# RADIO vision encoder", "", sentence, "",
        "| | |", "|---|---|",
        f"| parameters | {size} |",
        f"| width | {config.hidden_size} |",
        f"| blocks, heads | {config.num_hidden_layers}, {config.num_attention_heads} |",
        f"| patch | {config.patch_size} x {config.patch_size} pixels |",
        f"| prefix tokens | {config.num_cls_tokens} class, {config.num_registers} register |",
        f"| summary | {summary} class tokens, {summary * config.hidden_size} values |",
        f"| position table | made for {rows} x {columns} pixels |",
        "", "## Licence of the weights", "", said,
        "", "## Use", "", "```python",
        "from radio_triton import RadioModel", "",
        'model = RadioModel.from_pretrained("path/to/this/folder")',
        f"# images (B, {config.num_channels}, H, W): float in [0, 1], or uint8",
        "summary, features = model(images)", "```", "",
    ]  # fmt: skip
