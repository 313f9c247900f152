"""RadioModel is an ordinary nn.Module: dtypes, devices, autocast, copies, hooks."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from helpers import rel_error
from radio_triton import RadioModel
from tiny import FP64, VARIANTS, WIDTH, frozen, pixels, tiny_config, tiny_model

LINEARS = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")


def in_float64(model: RadioModel, x: Tensor) -> Tensor:
    """All tokens, from the same weights."""
    return copy.deepcopy(model).double()(x.double()).last_hidden_state


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16).float(),
        lambda m: m.to("cpu", torch.float16),
        lambda m: nn.Sequential(m).half()[0],
    ],
)
def test_statistics_stay_fp32(move: Callable[[RadioModel], RadioModel]) -> None:
    model = frozen()
    mean, std = model.input_conditioner.norm_mean.clone(), model.input_conditioner.norm_std.clone()
    moved = move(model)
    assert moved.input_conditioner.norm_mean.dtype == moved.input_conditioner.norm_std.dtype == torch.float32
    assert torch.equal(moved.input_conditioner.norm_mean, mean)
    assert torch.equal(moved.input_conditioner.norm_std, std)
    assert moved.summary_idxs.dtype == torch.int64
    assert {p.dtype for p in moved.parameters()} == {moved.dtype}
    assert moved(pixels(1, 3, 8, 8)).features.dtype == moved.dtype


def test_a_model_without_memory_takes_weights() -> None:
    model, x = frozen(), pixels(2, 3, 8, 12)
    built = RadioModel(model.config, device="meta", dtype=torch.bfloat16)
    for empty in (built, copy.deepcopy(model).to("meta", torch.bfloat16)):
        assert {p.device.type for p in empty.parameters()} == {"meta"}
        assert {p.dtype for p in empty.parameters()} == {torch.bfloat16}
        assert empty.input_conditioner.norm_mean.device.type == "meta"
        assert empty.input_conditioner.norm_mean.dtype == torch.float32
        filled = empty.to_empty(device="cpu").float()
        filled.load_state_dict(model.state_dict())
        assert torch.equal(filled(x).features, model(x).features)


def test_shapes_without_memory() -> None:
    model = frozen("qknorm").to("meta")
    output = model.encode([pixels(3, 8, 12).to("meta"), pixels(3, 3, 4, 4).to("meta")])
    assert [one.features.shape for one in output] == [(6, WIDTH), (2, 1, WIDTH)]
    assert model(pixels(2, 3, 8, 12).to("meta")).summary.shape == (2, 2 * WIDTH)


def test_autocast() -> None:
    model, x, types = frozen("mlpnorm"), pixels(2, 3, 8, 12), []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, args, out: types.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    assert types == [torch.bfloat16] * 9
    assert output.features.dtype == output.summary.dtype == torch.float32
    want = in_float64(model, x)
    error = rel_error(output.last_hidden_state, want)
    # more than the fp32 model's, and below the bf16 model's, whose weights are rounded too
    assert rel_error(model(x).last_hidden_state, want) < error
    assert error < rel_error(copy.deepcopy(model).bfloat16()(x).last_hidden_state, want)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_fp32_stream_lowers_the_error(name: str, dtype: torch.dtype) -> None:
    model, x = frozen(name, dtype, num_hidden_layers=4), pixels(4, 3, 24, 20)
    want = in_float64(model, x)
    pure = model(x)
    model.residual_dtype = torch.float32
    mixed = model(x)
    assert pure.features.dtype == dtype
    assert mixed.features.dtype == mixed.summary.dtype == torch.float32
    assert rel_error(mixed.last_hidden_state, want) < rel_error(pure.last_hidden_state, want)


def test_residual_dtype_is_an_argument() -> None:
    model = RadioModel(tiny_config(), dtype=torch.bfloat16, residual_dtype=torch.float32)
    assert model.dtype == torch.bfloat16
    assert model(pixels(1, 3, 8, 8)).features.dtype == torch.float32


@pytest.mark.parametrize("name", ["scaled", "qknorm"])
@pytest.mark.parametrize("dummies", [1, 3])
def test_dummy_heads_change_nothing(name: str, dummies: int) -> None:
    model = frozen(name, torch.float64, num_dummy_heads=0)
    padded = RadioModel(model.config.replace(num_dummy_heads=dummies), dtype=torch.float64)
    wide = padded.state_dict()
    assert wide["encoder.layer.0.attention.qkv.weight"].shape == (3 * (WIDTH + 16 * dummies), WIDTH)
    for key, value in model.state_dict().items():
        if value.shape == wide[key].shape:
            wide[key].copy_(value)
        elif ".qkv." in key:
            wide[key].unflatten(0, (3, -1))[:, :WIDTH] = value.unflatten(0, (3, -1))
        else:
            # proj's columns, and the weights of QK-norm, whose tail stays at random
            wide[key].normal_() if "norm" in key else None
            wide[key][..., :WIDTH] = value
    x = pixels(2, 3, 8, 12).double()
    assert rel_error(padded(x).last_hidden_state, model(x).last_hidden_state) < FP64


def test_dummy_heads_start_as_zero_rows_and_columns() -> None:
    for layer in RadioModel(tiny_config(num_dummy_heads=2)).encoder.layer:
        qkv, proj = layer.attention.qkv, layer.attention.proj
        assert qkv.weight.shape == (3 * 2 * WIDTH, WIDTH)
        for part in (qkv.weight.unflatten(0, (3, -1)), qkv.bias.unflatten(0, (3, -1))):
            assert not part[:, WIDTH:].any()
            assert part[:, :WIDTH].all()
        assert not proj.weight[:, WIDTH:].any()
        assert proj.weight[:, :WIDTH].all()


def test_state_dict_round_trip() -> None:
    model, other = frozen("qknorm"), RadioModel(tiny_config(**VARIANTS["qknorm"]))
    x = pixels(2, 3, 8, 12)
    assert not torch.equal(other(x).features, model(x).features)
    assert str(other.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(other(x).features, model(x).features)


def test_names_of_parameters() -> None:
    names = set(frozen("qknorm", num_hidden_layers=1).state_dict())
    norms = {f"norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}
    linears = {
        f"{n}.{kind}"
        for n in ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")
        for kind in ("weight", "bias")
    }
    others = {
        "attention.q_norm.weight",
        "attention.k_norm.weight",
        "layer_scale1.lambda1",
        "layer_scale2.lambda1",
    }
    assert names == {f"encoder.layer.0.{name}" for name in norms | linears | others} | {
        "embeddings.patch_projection.weight",
        "embeddings.video_patch_projection.weight",
        "embeddings.position_embedding",
        "embeddings.cls_register_token",
        "input_conditioner.norm_mean",
        "input_conditioner.norm_std",
        "summary_idxs",
    }


def test_input_embeddings() -> None:
    model = frozen()
    assert model.get_input_embeddings() is model.embeddings


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(clone: Callable[[RadioModel], RadioModel]) -> None:
    model, x = frozen("qknorm"), pixels(2, 3, 8, 12)
    model.residual_dtype = torch.float64
    want = model(x).features
    other = clone(model)
    assert torch.equal(other(x).features, want)
    assert other.config == model.config
    with torch.no_grad():
        other.embeddings.cls_register_token.zero_()
    assert torch.equal(model(x).features, want)


def test_inference_mode() -> None:
    model, x = tiny_model(**VARIANTS["qknorm"]), pixels(2, 3, 8, 12)
    with torch.inference_mode():
        output = model(x)
    assert output.features.is_inference()
    assert torch.equal(output.features, model(x).features)


def test_hooks_of_linear_layers_run() -> None:
    model, x = frozen(), pixels(1, 3, 8, 12)
    want, ran = model(x).features, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
    assert torch.equal(model(x).features, want)
    layers = [f"encoder.layer.{i}.{name}" for i in (0, 1) for name in LINEARS]
    assert ran == ["embeddings.patch_projection", *layers]
    model.encoder.layer[1].mlp.fc2.register_forward_hook(lambda *_: torch.zeros(11, WIDTH))
    assert not torch.equal(model(x).features, want)


class LoRA(nn.Module):
    """base(x) + B A x, with a base that is not trained."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(0.3 * torch.randn(rank, base.in_features, dtype=base.weight.dtype))
        self.b = nn.Parameter(0.3 * torch.randn(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize("targets", [LINEARS[:1], LINEARS])
@pytest.mark.parametrize("name", ["scaled", "qknorm", "mlpnorm"])
def test_low_rank_adapters(name: str, targets: tuple[str, ...]) -> None:
    model, merged = frozen(name, torch.float64), frozen(name, torch.float64)
    weights = dict(merged.named_parameters())
    for i in (0, 1):
        for target in targets:
            parent, child = target.split(".")
            module = model.encoder.layer[i].get_submodule(parent)
            setattr(module, child, LoRA(getattr(module, child)))
            lora, weight = getattr(module, child), weights[f"encoder.layer.{i}.{target}.weight"]
            weight += (lora.b @ lora.a).detach()
            weight.requires_grad_()
    x = pixels(2, 3, 8, 12).double()
    got, want = model(x).features, merged(x).features
    assert rel_error(got, want) < FP64
    got.square().sum().backward()
    want.square().sum().backward()
    for name_, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name_.split(".")[-1] not in ("a", "b"))
    for i in (0, 1):
        for target in targets:
            lora, grad = (
                model.encoder.layer[i].get_submodule(target),
                weights[f"encoder.layer.{i}.{target}.weight"].grad,
            )
            assert rel_error(lora.a.grad, lora.b.T @ grad) < FP64
            assert rel_error(lora.b.grad, grad @ lora.a.T) < FP64
