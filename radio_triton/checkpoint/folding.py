"""Parametrized weights of training checkpoints, folded into plain ones: spectral reparametrization and DAMP.

A weight W of such a file is stored as `X.parametrizations.weight.original` with, for spectral normalisation,
`scale`, `_u` and `_v` of W, or of each of its row blocks. The weight in use is W g / (u' W v + eps), u and v
after one power iteration, with g = softplus(scale) + 0.05, or scale itself in files without `_sn_version`.
DAMP is the identity outside training.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from .keys import CheckpointError

# (row block or None, "original" | "scale" | "_u" | "_v" | "_sn_version")
Role = tuple[int | None, str]

_KEY = re.compile(
    r"(?P<module>.+)\.parametrizations\.weight\."
    r"(?:(?P<original>original)|0\.(?:parts\.(?P<part>[0-2])\.)?(?P<leaf>scale|_u|_v|_sn_version))"
)
# the row blocks that are normalised each on its own
_CHUNKS = {"qkv": 3, "w12": 2}
_ALPHA = 0.05


def split_key(key: str) -> tuple[str, Role] | None:
    """The plain key of the weight that this key helps to make, and its role in that; None for an ordinary
    key.
    """
    if ".parametrizations." not in key:
        return None
    match = _KEY.fullmatch(key)
    if match is None:
        raise CheckpointError(
            f"{key} is not supported: only spectral and DAMP parametrizations of a weight are known"
        )
    part = int(match["part"]) if match["part"] else None
    return f"{match['module']}.weight", (part, match["original"] or match["leaf"])


def group_keys(keys: Iterable[str]) -> dict[str, dict[Role, str]]:
    """Plain key -> {role: key in the file} of every parametrized weight."""
    groups: dict[str, dict[Role, str]] = {}
    for key in keys:
        if found := split_key(key):
            groups.setdefault(found[0], {})[found[1]] = key
    for plain, roles in groups.items():
        if (None, "original") not in roles:
            raise CheckpointError(
                f"{plain} is parametrized, but its parametrizations.weight.original is missing"
            )
    return groups


def spectral_eps(args: Mapping[str, Any] | None) -> float:
    """The eps of `args.spectral_reparam`, which is True or a dictionary of options."""
    options = (args or {}).get("spectral_reparam")
    return float(options.get("eps", 1e-12)) if isinstance(options, Mapping) else 1e-6


@torch.no_grad()
def fold(plain: str, roles: Mapping[Role, str], read: Callable[[str], Tensor], eps: float) -> Tensor:
    """The weight in use, in the dtype of the original. `read` gives the tensor of a key of the file."""
    original = read(roles[None, "original"])
    parts = {part for part, leaf in roles if leaf != "original"}
    if not parts:
        return original
    chunks = 1 if parts == {None} else _CHUNKS.get(plain.split(".")[-2], 0)
    if (
        original.ndim != 2
        or not chunks
        or not original.shape[0]
        or original.shape[0] % chunks
        or not parts <= {None, *range(chunks)}
    ):
        raise CheckpointError(
            f"{plain}: a spectral parametrization of {len(parts)} parts does not fit {tuple(original.shape)}"
        )
    weight = torch.empty_like(original)
    for i, (block, out) in enumerate(zip(original.chunk(chunks), weight.chunk(chunks), strict=True)):
        part = None if chunks == 1 else i
        leaves = {
            leaf: read(key) for (owner, leaf), key in roles.items() if owner == part and leaf != "original"
        }
        # the values' block has no parametrization in files that leave values alone
        out.copy_(block * _factor(plain, block, leaves, eps) if leaves else block)
    return weight


def _factor(plain: str, block: Tensor, leaves: Mapping[str, Tensor], eps: float) -> Tensor:
    """g / sigma (), where sigma is the spectral norm of a block (rows, columns) as one power iteration
    estimates it.
    """
    sizes = {"scale": None, "_u": block.shape[0], "_v": block.shape[1]}
    for leaf, size in sizes.items():
        got = tuple(leaves[leaf].shape) if leaf in leaves else None
        if got is None or (got != (size,) if size else not leaves[leaf].numel()):
            raise CheckpointError(
                f"{plain}: {leaf} of its spectral parametrization is {got or 'missing'} for {tuple(block.shape)}"
            )
    matrix = block.to(torch.promote_types(block.dtype, torch.float32))
    u = normalize(matrix @ leaves["_v"].to(matrix.dtype), dim=0, eps=eps)
    v = normalize(matrix.T @ u, dim=0, eps=eps)
    # newer files repeat the scale four times
    scale = leaves["scale"].flatten()[0].to(matrix.dtype)
    gain = softplus(scale) + _ALPHA if "_sn_version" in leaves and int(leaves["_sn_version"]) != 1 else scale
    return gain / (u @ (matrix @ v) + eps)
