"""The command line: options and messages. The work is in modules of its own, imported when a command runs, so
that `radio-triton --help` loads no torch.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import click
except ImportError:
    sys.exit("the command line needs click, tqdm and Pillow: pip install 'radio_triton[cli]'")

from radio_triton import __version__, cli_checkpoint

if TYPE_CHECKING:
    from tqdm import tqdm

    from radio_triton.encode import Report
    from radio_triton.model import RadioModel

BUILT_IN = ("demo", "radio-tiny-meanshift")
FOLDER = click.Path(file_okay=False, path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="radio-triton")
def main() -> None:
    """RADIO vision encoders: photos in, features and pictures out."""


main.add_command(cli_checkpoint.inspect)
main.add_command(cli_checkpoint.convert)


@main.command()
@click.argument("paths", nargs=-1, required=True)
@click.option(
    "--model",
    "model_name",
    default="demo",
    show_default=True,
    metavar="NAME",
    help="A folder, a checkpoint file, a hub id such as nvidia/C-RADIOv4-H, or 'demo': the built-in model, "
    "whose weights are a formula, not trained.",
)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Default: the model's own."
)
@click.option("--device", help="cpu, cuda, cuda:1. Default: cuda where there is one.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=16384,
    show_default=True,
    help="Patches and prefix tokens in one packed call. An image above that is encoded alone.",
)
@click.option(
    "--long-side",
    type=click.IntRange(min=1),
    metavar="PIXELS",
    help="Shrink images whose longer side is above this. Default: the largest the model has positions for.",
)
@click.option(
    "--out",
    type=FOLDER,
    default="features",
    show_default=True,
    help="Folder for the features, one .safetensors an image.",
)
def encode(
    paths: tuple[str, ...],
    model_name: str,
    dtype: str | None,
    device: str | None,
    max_tokens: int,
    long_side: int | None,
    out: Path,
) -> None:
    """Encode images into features.

    PATHS are files, folders (searched to the bottom) and patterns such as 'photos/**/*.jpg'. Images may have
    any sizes; each is resized to the nearest one that the model takes. Features of x.jpg go to
    OUT/x.jpg.safetensors, and are skipped when they are there already, made from the same content by the same
    model with the same options. A file that cannot be read is reported at the end, and the exit code is 1.
    """
    from radio_triton.encode import belongs_to_another, encode_files
    from radio_triton.image import SUFFIXES
    from radio_triton.sources import list_sources, unique_names

    sources, missing = list_sources(paths, SUFFIXES, skip=out)
    if not sources:
        raise click.UsageError(
            f"no image found in {', '.join(paths)}: give image files, folders with some, or patterns"
        )
    model = load_model(model_name, dtype, device)
    name = shown_name(model_name)
    start = time.perf_counter()
    with failing_in_words(), progress(len(sources), "image") as bar:
        named = unique_names(sources, taken=lambda source: belongs_to_another(out, source))
        report = encode_files(
            model, named, out, model_name=name, max_tokens=max_tokens, long_side=long_side, advance=bar.update
        )
    say_encoded(report, out, name, time.perf_counter() - start)
    fail_if(report.failed + nothing_at(missing), "read")


@main.command()
@click.argument("paths", nargs=-1, required=True)
@click.option(
    "--joint", is_flag=True, help="One PCA for all, so that colours mean the same in every picture."
)
@click.option(
    "--out",
    type=FOLDER,
    default="pictures",
    show_default=True,
    help="Folder for the pictures, one .png an image.",
)
def viz(paths: tuple[str, ...], joint: bool, out: Path) -> None:
    """Draw features as colours, by a PCA that a few outlier patches do not spoil.

    PATHS are features files as `encode` and `demo` write them, folders of such files, and patterns.
    """
    from radio_triton.pictures import draw_files
    from radio_triton.sources import list_sources, unique_names

    sources, missing = list_sources(paths, {".safetensors"})
    if not sources:
        raise click.UsageError(
            f"no features file found in {', '.join(paths)}: radio-triton encode writes them"
        )
    with failing_in_words(), progress(len(sources), "file") as bar:
        drawn, failed = draw_files(unique_names(sources), out, joint=joint, advance=bar.update)
    click.echo(f"drew {count(drawn, 'picture')} into {out}")
    fail_if(failed + nothing_at(missing), "drawn")


@main.command()
@click.option(
    "--out", type=FOLDER, default="out", show_default=True, help="Folder for the features and the pictures."
)
def demo(out: Path) -> None:
    """Encode the sample photos and a short clip with the built-in model, and draw what it sees."""
    from radio_triton.demo import count_steps, run_demo

    with failing_in_words(), progress(count_steps(), "step") as bar:

        def step(what: str) -> None:
            bar.set_description(what, refresh=False)
            bar.update()

        lines = run_demo(out, step)
    click.echo("\n".join(lines))


@main.command()
def doctor() -> None:
    """Say which versions, devices and kernels this installation has."""
    from radio_triton.doctor import report

    click.echo("\n".join(report()))


def load_model(name: str, dtype: str | None, device: str | None) -> "RadioModel":
    import torch

    from radio_triton.demo_model import demo_model
    from radio_triton.model import RadioModel

    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise click.BadParameter(f"{device}: {str(error).splitlines()[0]}", param_hint="--device") from error
    wanted = getattr(torch, dtype) if dtype else None
    if name in BUILT_IN:
        return demo_model(dtype=wanted or torch.float32, device=where)
    try:
        return RadioModel.from_pretrained(name, dtype=wanted, device=where)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{name}: {error}", param_hint="--model") from error


def shown_name(model_name: str) -> str:
    """What the metadata call a model: of a file or folder the last part, not where it lies."""
    if model_name in BUILT_IN:
        return BUILT_IN[1]
    return Path(model_name).resolve().name if Path(model_name).exists() else model_name


@contextmanager
def failing_in_words() -> Iterator[None]:
    """What a full disk, a missing package or too large a batch gets: one sentence, not a traceback."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        hint = "lower --max-tokens or --long-side; what is written stays, and the next run goes on from there"
        raise click.ClickException(f"the device is out of memory: {hint}") from error
    except (OSError, ImportError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def progress(total: int, unit: str) -> "tqdm":
    from tqdm import tqdm

    # disable=None: no bar where stderr is not a terminal
    return tqdm(total=total, unit=unit, disable=None, leave=False)


def nothing_at(arguments: list[str]) -> list[tuple[str, str]]:
    """The failures of arguments that mean no file."""
    return [
        (each, "no file of this kind in it" if Path(each).is_dir() else "no such file, and none matches it")
        for each in arguments
    ]


def say_encoded(report: "Report", out: Path, name: str, seconds: float) -> None:
    remark = " (a formula, not trained; --model names others)" if name == BUILT_IN[1] else ""
    click.echo(f"model: {name}{remark}")
    line = f"encoded {count(report.encoded, 'image')} ({report.patches} patches) into {out}"
    click.echo(f"{line}: {seconds:.1f} s, {report.encoded / seconds:.1f} images/s")
    if report.kept:
        click.echo(f"kept {count(report.kept, 'file')} already there: same content, model and options")
    if report.shrunk:
        click.echo(f"shrank {count(report.shrunk, 'image')} above the largest size, which --long-side sets")
    if report.encoded + report.kept:
        click.echo(f"next: radio-triton viz {out}")


def fail_if(failed: list[tuple[str, str]], done: str) -> None:
    """Report what went wrong, if anything, and exit with 1."""
    if not failed:
        return
    click.echo(f"{count(len(failed), 'file')} could not be {done}:", err=True)
    for path, reason in failed:
        click.echo(f"  {click.format_filename(path)}: {reason}", err=True)
    sys.exit(1)


def count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
