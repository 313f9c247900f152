"""The commands about checkpoints: what a file is, and the same model in another form."""

import json as json_format
import signal
import sys
from pathlib import Path

import click

OFFLINE = click.option(
    "--local-files-only", is_flag=True, help="Of a hub id: use what is downloaded, never the network."
)
REVISION = click.option("--revision", metavar="NAME", help="Of a hub id: a branch, tag or commit.")


@click.command()
@click.argument("source")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
@REVISION
@OFFLINE
def inspect(source: str, as_json: bool, revision: str | None, local_files_only: bool) -> None:
    """Say what a checkpoint is, without loading its weights.

    SOURCE is a folder, a file (.safetensors, .pth.tar, .pt) or a hub id. The exit code is 0 where
    from_pretrained would load it, 1 where it would refuse it, 2 where it cannot be read.
    """
    from radio_triton.checkpoint.inspection import inspect_checkpoint

    try:
        found = inspect_checkpoint(source, revision=revision, local_files_only=local_files_only)
    except (OSError, ValueError, ImportError) as error:
        if as_json:
            click.echo(json_format.dumps({"source": source, "error": str(error)}))
        else:
            click.echo(f"cannot read {source}: {error}", err=True)
        sys.exit(2)
    click.echo(json_format.dumps(found.to_dict(), indent=2) if as_json else "\n".join(found.lines()))
    sys.exit(1 if found.refused else 0)


@click.command()
@click.argument("source", metavar="IN")
@click.argument("folder", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "form",
    type=click.Choice(["native", "legacy", "fused"]),
    required=True,
    help="native: Transformers' RadioModel. legacy: the names of NVIDIA's remote code. fused: our own and "
    "vLLM's names, which hold every model.",
)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Default: the checkpoint's own."
)
@click.option("--fold-layer-scale", is_flag=True, help="Multiply LayerScale into the layers before it.")
@click.option("--license", metavar="NAME", help="Of the weights, for the model card. Default: what IN says.")
@click.option("--force", is_flag=True, help="Replace the model in OUT; other files there stay.")
@REVISION
@OFFLINE
def convert(
    source: str,
    folder: Path,
    form: str,
    dtype: str | None,
    fold_layer_scale: bool,
    license: str | None,
    force: bool,
    revision: str | None,
    local_files_only: bool,
) -> None:
    """Write a checkpoint in another form, and prove that it computes the same.

    IN is a folder, a file or a hub id; OUT a folder, which appears only when the result has been read back
    and its outputs agree.
    """
    import torch

    from radio_triton.checkpoint.convert import convert as run_convert

    # what was begun is removed on the way out, which a plain SIGTERM would skip
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        said = run_convert(
            source,
            folder,
            form,
            dtype=getattr(torch, dtype) if dtype else None,
            fold_layer_scale=fold_layer_scale,
            license=license,
            overwrite=force,
            revision=revision,
            local_files_only=local_files_only,
        )
    except (OSError, ValueError, ImportError) as error:
        raise click.ClickException(str(error)) from error
    finally:
        signal.signal(signal.SIGTERM, previous)
    click.echo("\n".join([f"wrote {folder}", *said]))
