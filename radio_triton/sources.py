"""Which files a command line means, and under which name the result of each is kept."""

import glob
import hashlib
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    path: Path
    name: str  # relative to the folder given, with its suffix: "holiday/x.jpg"


def list_sources(
    arguments: Iterable[str], suffixes: Collection[str], skip: Path | None = None
) -> tuple[list[Source], list[str]]:
    """Files, folders and glob patterns → the files they mean, each once, and the arguments that mean none.

    A file named outright is taken whatever its suffix. Folders are walked to the bottom in sorted order for
    the given suffixes, past hidden names and the folder `skip`. A pattern is tried where no such file exists;
    `**` crosses folders.
    """
    found: dict[str, Source] = {}
    missing = []
    for argument in arguments:
        paths = [argument] if os.path.lexists(argument) else sorted(glob.glob(argument, recursive=True))
        sources = [source for path in paths for source in _expand(Path(path), suffixes, skip)]
        if not sources:
            missing.append(argument)
        for source in sources:
            found.setdefault(os.path.abspath(source.path), source)
    return list(found.values()), missing


def unique_names(
    sources: Iterable[Source], taken: Callable[[Source], bool] = lambda source: False
) -> list[Source]:
    """Where two sources have one name (a/x.jpg and b/x.jpg, whatever the case), or `taken` says that a name
    is another's, a mark that only the source's own path decides is added: x-1a2b3c4d.jpg."""
    seen: set[str] = set()
    result = []
    for source in sources:
        if source.name.casefold() in seen or taken(source):
            name = Path(source.name)
            mark = path_id(source.path)[:8]
            source = source._replace(name=str(name.with_name(f"{name.stem}-{mark}{name.suffix}")))
        seen.add(source.name.casefold())
        result.append(source)
    return result


def path_id(path: Path) -> str:
    """sha256 of the absolute path: tells files of one name apart without publishing where they lie."""
    return hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()


def _expand(path: Path, suffixes: Collection[str], skip: Path | None) -> list[Source]:
    if not path.is_dir():
        return [Source(path, path.name)]
    files = []
    for folder, children, names in os.walk(path):
        shown = [child for child in sorted(children) if not child.startswith(".")]
        children[:] = [
            child for child in shown if not skip or Path(folder, child).resolve() != skip.resolve()
        ]
        files += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    return [Source(file, str(file.relative_to(path))) for file in files if file.suffix.lower() in suffixes]
