"""Text towers of the teachers that have one, through open_clip or Transformers: `pip install radio-triton[text]`.

Vision heads need none of this; a tower is loaded, from the network or its library's cache, when a text is encoded.
"""

import re
import string
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize as unit

# what a teacher's `model` is called on the hub; anything else is taken for a hub id or a folder
SIGLIP2 = {
    "siglip2-g-384": "google/siglip2-giant-opt-patch16-384",
    "siglip2-so400m": "google/siglip2-so400m-patch16-naflex",
}
# SigLIP2 was trained on texts of this many tokens, padding last and attended to
_PADDED = {"padding": "max_length", "padding_side": "right", "truncation": True, "max_length": 64}
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def canonicalize(text: str) -> str:
    """A text as SigLIP2 was trained on it: lower case, single spaces, no punctuation, an underscore is a space.

    Its tokenizer does not do this, which costs about 12 points of zero-shot accuracy.
    """
    return re.sub(r"\s+", " ", text.replace("_", " ").translate(_PUNCTUATION).lower()).strip()


class TextTower:
    """tokenize: texts to ids (n, L). embed: ids to (n, D). model: what holds the weights."""

    def __init__(
        self, model: nn.Module, tokenize: Callable[[Any], Tensor], embed: Callable[[Tensor], Tensor]
    ) -> None:
        self.model, self.tokenize, self._embed = model.eval().requires_grad_(False), tokenize, embed

    @torch.no_grad()
    def encode(self, texts: str | list[str] | Tensor, normalize: bool, device: torch.device) -> Tensor:
        """fp32 (n, D) of texts or ids, of length 1 if `normalize`; the tower moves to the device."""
        ids = texts if isinstance(texts, Tensor) else self.tokenize(texts)
        self.model.to(device)
        out = self._embed(ids.to(device)).float()
        return unit(out, dim=-1) if normalize else out


def text_tower(name: str, teacher: Mapping[str, Any]) -> TextTower:
    """Load the tower of adaptor `name`, whose teacher the training script describes by type, model and pretrained.

    ValueError where that is no text tower, ImportError where its library is missing, OSError where its weights are.
    """
    kind, model = teacher.get("type"), teacher.get("model")
    if kind not in ("open_clip", "siglip2") or not model:
        said = f"its teacher is of type {kind!r}" if kind else "the checkpoint does not say what taught it"
        raise ValueError(
            f"adaptor {name} has no text tower that is known: {said}, and only teachers of type 'open_clip' and "
            "'siglip2' have one"
        )
    if kind == "open_clip":
        return _open_clip(str(model), teacher.get("pretrained"))
    return _siglip2(str(model))


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"a text tower needs {name}: pip install radio-triton[text]") from error


def _open_clip(name: str, pretrained: Any) -> TextTower:
    open_clip = _library("open_clip")
    try:
        model = open_clip.create_model_from_pretrained(name, pretrained=pretrained, return_transform=False)
        tokenizer = open_clip.get_tokenizer(name)
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"the text tower {name} ({pretrained}) could not be loaded by open_clip: {error}"
        ) from error
    # the vision tower is the one that RADIO replaces
    model.visual = None
    return TextTower(
        model, lambda texts: tokenizer([texts] if isinstance(texts, str) else texts), model.encode_text
    )


def _siglip2(name: str) -> TextTower:
    transformers = _library("transformers")
    source = SIGLIP2.get(name, name)
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        # the NaFlex towers are a class of their own
        kind = (
            transformers.Siglip2TextModel if config.model_type == "siglip2" else transformers.SiglipTextModel
        )
        model = kind.from_pretrained(source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise OSError(f"the text tower {source} could not be loaded by Transformers: {error}") from error

    def tokenize(texts: str | list[str]) -> Tensor:
        plain = [canonicalize(text) for text in ([texts] if isinstance(texts, str) else texts)]
        return tokenizer(plain, return_tensors="pt", **_PADDED).input_ids

    return TextTower(model, tokenize, lambda ids: model(input_ids=ids).pooler_output)
