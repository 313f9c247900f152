"""Checkpoints of the Hugging Face hub: only the files that are needed."""

import re
from pathlib import Path
from typing import Any

from .keys import CheckpointError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NAMES = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = (".pth.tar", ".pth", ".pt", ".bin")


class Repository:
    """A Hugging Face repository. `source` is its id; FileNotFoundError for anything that is no id."""

    def __init__(self, source: str, revision: str | None, local_files_only: bool) -> None:
        self.source, self.revision = source, revision
        if not _ID.fullmatch(source) or source.endswith((".safetensors", ".json", *_PICKLES)):
            raise FileNotFoundError(
                f"{source} does not exist: pass a folder with the weights and config.json, a file, or a "
                "Hugging Face id such as nvidia/C-RADIOv4-H"
            )
        from huggingface_hub import constants

        self.local_files_only = local_files_only or constants.HF_HUB_OFFLINE

    def weights(self) -> Path:
        """The local path of the weights or of their index, with config.json beside it where the repository
        has one.
        """
        self._download("config.json")
        for name in _NAMES:
            if path := self._download(name):
                return path
        files = self._list()
        if len(files) != 1:
            raise CheckpointError(
                f"{self.source} has {len(files)} files that may be the weights ({', '.join(files[:4]) or 'none'}): "
                "download one and pass its path"
            )
        return self.file(files[0])

    def file(self, name: str) -> Path:
        """The local path of a file that the repository must have."""
        path = self._download(name)
        if path is None:
            raise CheckpointError(f"{self.source} has no {name}: the repository is incomplete")
        return path

    def _list(self) -> list[str]:
        """Other files at the top of the repository that may be weights."""
        from huggingface_hub import HfApi

        if self.local_files_only:
            raise self._unreachable("none of its weights are in the local cache")
        try:
            names = HfApi().list_repo_files(self.source, revision=self.revision)
        except Exception as error:
            raise self._unreachable(error) from error
        return [name for name in names if "/" not in name and name.endswith((".safetensors", *_PICKLES))]

    def _download(self, name: str) -> Path | None:
        """The local path of a file; None where the repository, or with local_files_only the cache, has
        none.
        """
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            options: dict[str, Any] = {"revision": self.revision, "local_files_only": self.local_files_only}
            return Path(hf_hub_download(self.source, name, **options))
        except LocalEntryNotFoundError as error:
            # offline, this is all that is known; online, it means that the hub did not answer
            if self.local_files_only:
                return None
            raise self._unreachable(error) from error
        except EntryNotFoundError:
            return None
        except Exception as error:
            raise self._unreachable(error) from error

    def _unreachable(self, reason: object) -> CheckpointError:
        text = str(reason).strip().splitlines()
        return CheckpointError(
            f"{self.source} is no file or folder here, and as a Hugging Face id it could not be read "
            f"({text[0][:160] if text else type(reason).__name__}): pass the path of a folder or file with "
            "the weights, or of a download made elsewhere (`hf download`)"
        )
