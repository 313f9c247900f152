"""What a forward pass asks of the device: dispatched operations, the bytes they move, values read back."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from radio_triton import RadioModel
from tiny import VARIANTS, WIDTH, frozen, pixels

# looking at pixels, which the CPU alone does: see model.warn_if_normalized
PIXEL_CHECK = {"aten.aminmax", "aten._local_scalar_dense"}
READS = {"aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero"}
OURS = "radio_triton."


class Call(NamedTuple):
    """One operation: its name, the tensors it took, those it overwrote, and those it returned."""

    name: str
    inputs: list[Tensor]
    written: list[Tensor]
    outputs: list[Tensor]

    @property
    def is_view(self) -> bool:
        """Whether it moves nothing: every result lies in an input's memory, and nothing was overwritten."""
        memory = {x.untyped_storage()._cdata for x in self.inputs}
        return not self.written and all(x.untyped_storage()._cdata in memory for x in self.outputs)


class Recorder(TorchDispatchMode):
    """Keeps every operation dispatched to a backend. What an op of ours does inside is not dispatched here."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        arguments = zip(func._schema.arguments, args, strict=False)
        written = [x for spec, x in arguments if spec.alias_info is not None and spec.alias_info.is_write]
        inputs, outputs, written = (
            [x for x in tree_leaves(part) if isinstance(x, Tensor)] for part in ((args, kwargs), out, written)
        )
        self.calls.append(Call(str(func).removesuffix(f".{func._overloadname}"), inputs, written, outputs))
        return out


def record(function: Callable[[Any], Any], x: Any) -> list[Call]:
    with Recorder() as recorder:
        function(x)
    return recorder.calls


def work(calls: Iterable[Call], device: str = "cpu") -> Counter[str]:
    """Operations that touch a device, by name: all but views, and but for the look at pixels on the CPU."""
    return Counter(
        call.name
        for call in calls
        if not call.is_view
        and call.name not in PIXEL_CHECK
        and any(x.device.type == device for x in (*call.inputs, *call.outputs))
    )


def images(count: int, kind: str, device: str = "cpu") -> Tensor | list[Tensor]:
    if kind == "dense":
        return pixels(count, 3, 8, 12).to(device)
    sizes = [(4 * (1 + i % 8), 4 * (1 + i // 8)) if kind == "mixed" else (8, 12) for i in range(count)]
    return [pixels(3, h, w).to(device) for h, w in sizes]


@pytest.mark.parametrize("kind", ["dense", "list", "mixed"])
@pytest.mark.parametrize("name", VARIANTS)
def test_64_images_take_as_many_operations_as_one(name: str, kind: str) -> None:
    model = frozen(name)
    one, many = (work(record(model, images(n, kind))) for n in (1, 64))
    assert many == one
    ours = {op: n for op, n in one.items() if op.startswith(OURS)}
    assert ours[f"{OURS}varlen_attention"] == 2 and ours[f"{OURS}embed_tokens"] == 1
    assert ours[f"{OURS}patchify{'' if kind == 'dense' else '_list'}"] == 1
    # 2,675 in Transformers for 64 images, with 32 layers; here there are 2
    assert one.total() <= 60


@pytest.mark.parametrize("name", ["scaled", "qknorm"])
def test_encoding_64_items_launches_as_much_as_encoding_one(name: str) -> None:
    # operations on the host's own tables differ, those on the device, which a meta tensor stands for, do not
    model = frozen(name).to("meta")
    one, many = (work(record(model.encode, images(n, "mixed", "meta")), "meta") for n in (1, 64))
    assert many == one and one[f"{OURS}varlen_attention"] == 2


INPUTS: dict[str, Callable[[RadioModel, str], Any]] = {
    "dense": lambda model, device: model(images(2, "dense", device)),
    "maps": lambda model, device: model(images(2, "dense", device), feature_fmt="NCHW"),
    "mixed": lambda model, device: model(images(3, "mixed", device)),
    "patches": lambda model, device: model(pixels(10, 48).to(device), imgs_sizes=[(8, 8), (8, 12)]),
    "video": lambda model, device: model(pixels(5, 3, 8, 8).to(device), num_frames=5),
    "items": lambda model, device: model.encode(
        [pixels(3, 8, 8).to(device), pixels(5, 3, 8, 8).to(device), pixels(3, 8, 12).to(device)]
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", INPUTS)
def test_no_device_value_is_read(kind: str, name: str) -> None:
    # a meta tensor has no values: reading one raises
    assert INPUTS[kind](frozen(name).to("meta"), "meta") is not None
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.empty(1, device="meta").item()


@pytest.mark.parametrize("kind", ["dense", "mixed"])
def test_only_the_pixels_are_looked_at_and_only_on_the_cpu(kind: str) -> None:
    model, x = frozen("qknorm"), images(3, kind)
    calls = record(model, x)
    names = [call.name for call in calls]
    start = next(i for i, name in enumerate(names) if name.startswith(f"{OURS}patchify"))
    assert not READS & set(names[start:])
    reads = [call for call in calls[:start] if call.name in READS]
    assert len(reads) == 2 * (1 if kind == "dense" else 3)
    # bytes cannot look normalised
    whole = (255 * x).to(torch.uint8) if isinstance(x, Tensor) else [(255 * y).to(torch.uint8) for y in x]
    assert not READS & {call.name for call in record(model, whole)}


def layers(model: RadioModel, x: Tensor) -> list[list[Call]]:
    """The operations of each layer, views apart; the first LayerNorm and what follows the last layer left out."""
    calls = [call for call in record(model, x) if not call.is_view]
    names = [call.name for call in calls]
    start = names.index(f"{OURS}layer_norm") + 1
    stop = len(names) - names[::-1].index(f"{OURS}layerscale_residual_")
    size, rest = divmod(stop - start, model.config.num_hidden_layers)
    assert rest == 0
    return [calls[i : i + size] for i in range(start, stop, size)]


@pytest.mark.parametrize("name", ["scaled", "qknorm"])
def test_a_layer_is_eight_launches_or_nine(name: str) -> None:
    middle, last = layers(frozen(name), images(5, "dense"))
    ours = ["qk_rms_norm_"] if name == "qknorm" else []
    want = ["aten.addmm", *(OURS + op for op in [*ours, "varlen_attention"]), "aten.addmm"]
    want += [f"{OURS}layerscale_residual_norm_", "aten.addmm", f"{OURS}gelu_", "aten.addmm"]
    assert [call.name for call in middle] == [*want, f"{OURS}layerscale_residual_norm_"]
    assert [call.name for call in last] == [*want, f"{OURS}layerscale_residual_"]
    assert len(middle) == 8 + len(ours)


def moved(call: Call, tokens: int) -> int:
    """Bytes of streams, tensors of a row a token: each read once, and written once."""
    return sum(x.nbytes for x in (*call.inputs, *call.written, *call.outputs) if x.shape[:1] == (tokens,))


@pytest.mark.parametrize(("residual", "units"), [(None, 16), (torch.float32, 20)])
def test_elementwise_traffic_of_a_layer(residual: torch.dtype | None, units: int) -> None:
    # an fp32 stream counts double, and is read and written twice
    model = frozen("scaled", torch.bfloat16, intermediate_size=4 * WIDTH)
    model.residual_dtype = residual
    tokens = 5 * (2 * 3 + model.config.num_prefix_tokens)
    (middle, _) = layers(model, images(5, "dense"))
    ours = [call for call in middle if call.name.startswith(OURS) and "attention" not in call.name]
    assert sum(moved(call, tokens) for call in ours) == units * tokens * WIDTH * 2


def test_qk_norm_moves_four_units_more() -> None:
    model = frozen("qknorm", torch.bfloat16, num_dummy_heads=0)
    tokens = 5 * (2 * 3 + model.config.num_prefix_tokens)
    (call,) = [c for c in layers(model, images(5, "dense"))[0] if c.name == f"{OURS}qk_rms_norm_"]
    # q and k are read and written; v, a third of the buffer, is not touched
    assert moved(call, tokens) * 2 // 3 == 4 * tokens * WIDTH * 2


@pytest.mark.parametrize("name", ["scaled", "qknorm"])
def test_q_k_v_and_the_attention_output_are_never_copied(name: str) -> None:
    for calls in layers(frozen(name), images(5, "dense")):
        at = next(i for i, call in enumerate(calls) if call.name == f"{OURS}varlen_attention")
        (buffer,), attention = calls[0].outputs, calls[at]
        width = buffer.shape[1] // 3
        starts = [x.data_ptr() - buffer.data_ptr() for x in attention.inputs[:3]]
        assert starts == [0, width * 4, 2 * width * 4]
        assert all(x.stride(0) == 3 * width for x in attention.inputs[:3])
        (out,) = attention.outputs
        assert any(x.data_ptr() == out.data_ptr() and x.shape == out.shape for x in calls[at + 1].inputs)


def test_without_layer_scale_there_is_none_to_move() -> None:
    scaled, plain = (frozen("scaled"), frozen("scaled", layer_scale=False))
    counts = [
        sum(len(call.inputs) for call in layers(model, images(1, "dense"))[0]) for model in (scaled, plain)
    ]
    assert counts[0] == counts[1] + 2
