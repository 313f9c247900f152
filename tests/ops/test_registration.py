"""What every op owes the dispatcher: schema, fake, gradients, in-place rules, one compilation.

varlen_attention, whose gradient is the longest, has its own file.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from helpers import rel_error
from op_checks import laid_out, rand
from radio_triton import ops
from radio_triton.kernels import _common

Arguments = tuple[Any, ...]
EPS = 1e-3


def embedding(n: int, d: torch.dtype) -> Arguments:
    """n - 1 images of 2 x 3 patches and a tubelet of 1 x 4."""
    grids = torch.tensor([(2, 3)] * (n - 1) + [(1, 4)], dtype=torch.int32)
    lengths = torch.tensor([0] + [8] * (n - 1) + [6]).cumsum(0, dtype=torch.int32)
    rows = rand(6 * (n - 1), 4, dtype=d), rand(4, 4, dtype=d)
    return (
        *rows,
        rand(2, 4, dtype=d),
        rand(4, 5, 4, dtype=d),
        grids,
        grids.clone(),
        lengths,
        None,
        True,
        False,
        d,
    )


def branch(n: int, d: torch.dtype) -> Arguments:
    return rand(n, 6, dtype=d), rand(n, 6, dtype=d)


def norm(d: torch.dtype) -> Arguments:
    return rand(6, dtype=d), rand(6, dtype=d), EPS, d


def normalisation(d: torch.dtype) -> Arguments:
    return rand(2, dtype=d), rand(2, dtype=d).abs() + 1, 2, 2, d


# arguments of each op for n sequences or tokens, by the name of the case: "op" or "op/variant"
CASES: dict[str, Callable[[int, torch.dtype], Arguments]] = {
    "patchify": lambda n, d: (rand(n, 2, 4, 2, dtype=d), *normalisation(d)),
    "patchify_list": lambda n, d: ([rand(n, 2, 4, 2, dtype=d), rand(3, 2, 2, 4, dtype=d)], *normalisation(d)),
    "embed_tokens": embedding,
    "layer_norm": lambda n, d: (rand(n, 6, dtype=d), *norm(d)),
    "qk_rms_norm": lambda n, d: (rand(n, 3, 2, 4, dtype=d), rand(8, dtype=d), rand(8, dtype=d), EPS, 6),
    "qk_square_sums": lambda n, d: (rand(n, 3, 2, 4, dtype=d), 6),
    "qk_rms_scale": lambda n, d: (
        *(rand(n, 3, 2, 4, dtype=d), rand(n, 2, dtype=torch.promote_types(d, torch.float32)).abs() + 1),
        *(rand(8, dtype=d), rand(8, dtype=d), EPS, 6),
    ),
    "layerscale_residual": lambda n, d: (*branch(n, d), rand(6, dtype=d)),
    "layerscale_residual/plain": lambda n, d: (*branch(n, d), None),
    "layerscale_residual_norm": lambda n, d: (*branch(n, d), rand(6, dtype=d), *norm(d)),
    "layerscale_residual_norm/plain": lambda n, d: (*branch(n, d), None, *norm(d)),
    "gelu": lambda n, d: (rand(n, 6, dtype=d),),
    "swiglu": lambda n, d: (rand(n, 6, dtype=d),),
}
NAMES = {case.split("/")[0] for case in CASES}
STREAM = [case for case in CASES if case.startswith(("layer", "gelu", "swiglu"))]
INPLACE = [case for case in CASES if f"{case.split('/')[0]}_" in ops.OPS]


def overload(case: str, suffix: str = "") -> Any:
    return getattr(torch.ops.radio_triton, case.split("/")[0] + suffix).default


def trainable(arguments: Arguments, only: int | None = None) -> Arguments:
    """A copy whose floating point tensors, or only one of them, require a gradient."""
    copies = tree_map_only(Tensor, Tensor.clone, arguments)
    inexact = [x for x in tree_flatten(copies)[0] if isinstance(x, Tensor) and x.is_floating_point()]
    for x in inexact if only is None else [inexact[only]]:
        x.requires_grad_()
    return copies


def leaves(arguments: Arguments) -> list[Tensor]:
    return [x for x in tree_flatten(arguments)[0] if isinstance(x, Tensor) and x.requires_grad]


def gradients(case: str, arguments: Arguments, function: Callable | None = None) -> list[Tensor]:
    """Of a weighted sum of the outputs, so that every element counts differently."""
    outputs = tree_flatten((function or overload(case))(*arguments))[0]
    total = sum((x.double() * torch.linspace(0.5, 2, x.numel()).view(x.shape)).sum() for x in outputs)
    return list(torch.autograd.grad(total, leaves(arguments)))


def same(got: Any, want: Any) -> bool:
    """Equal bits in every tensor, and None where the other has it."""
    pairs = zip(tree_flatten(got)[0], tree_flatten(want)[0], strict=True)
    return all(a is b if b is None else torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def test_every_op_has_a_case():
    in_place = {f"{case.split('/')[0]}_" for case in INPLACE}
    assert NAMES | in_place | {"varlen_attention"} == set(ops.OPS)


@pytest.mark.parametrize("name", ops.OPS)
def test_schema_says_what_is_written(name: str):
    op = overload(name)
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ([op._schema.arguments[0].name] if name.endswith("_") else [])
    assert torch.Tag.pt2_compliant_tag in op.tags


@pytest.mark.parametrize("trains", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("case", CASES)
def test_opcheck(case: str, trains: bool):
    arguments = CASES[case](3, torch.float32)
    opcheck(overload(case), trainable(arguments) if trains else arguments)


@pytest.mark.parametrize("case", INPLACE)
def test_opcheck_in_place(case: str):
    opcheck(overload(case, "_"), CASES[case](3, torch.float32))


@pytest.mark.parametrize("case", CASES)
def test_opcheck_backward(case: str):
    arguments = CASES[case](3, torch.float32)
    grads = [torch.randn_like(x) for x in tree_flatten(overload(case)(*arguments))[0]]
    needs = [isinstance(x, Tensor) and x.is_floating_point() for x in tree_flatten(arguments)[0]]
    opcheck(overload(case, "_backward"), (grads, needs, *arguments))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_fake_gives_shape_dtype_and_strides(case: str, dtype: torch.dtype):
    opcheck(overload(case), CASES[case](3, dtype), test_utils="test_faketensor")


@pytest.mark.parametrize("case", [case for case in CASES if "dtype" in str(overload(case)._schema)])
def test_fake_of_a_result_in_another_dtype(case: str):
    arguments = tree_map_only(torch.dtype, lambda _: torch.bfloat16, CASES[case](3, torch.float32))
    opcheck(overload(case), arguments, test_utils="test_faketensor")
    if case in INPLACE:
        opcheck(overload(case, "_"), arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("layout", ["chunk", "rows", "transposed", "empty"])
@pytest.mark.parametrize("case", STREAM)
def test_fake_of_strided_and_of_empty_input(case: str, layout: str):
    arguments = CASES[case](0 if layout == "empty" else 4, torch.float32)
    if layout != "empty":
        arguments = tree_map_only(Tensor, lambda x: laid_out(x, layout) if x.ndim == 2 else x, arguments)
    opcheck(overload(case), arguments, test_utils=("test_schema", "test_faketensor"))
    if case in INPLACE:
        opcheck(overload(case, "_"), arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case: str):
    arguments = trainable(CASES[case](3, torch.float64))
    flat, spec = tree_flatten(arguments)
    places = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad]

    def call(*inputs: Tensor) -> Any:
        full = list(flat)
        for i, x in zip(places, inputs, strict=True):
            full[i] = x
        return overload(case)(*tree_unflatten(full, spec))

    assert gradcheck(call, [flat[i] for i in places])


@pytest.mark.parametrize("case", CASES)
def test_gradient_of_one_input_alone(case: str):
    arguments = CASES[case](3, torch.float32)
    together = gradients(case, trainable(arguments))
    for i, want in enumerate(together):
        (got,) = gradients(case, trainable(arguments, only=i))
        assert torch.equal(got, want), f"input {i}"


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_callers_own(case: str):
    # a gradient that shares memory with another is overwritten by a compiler that plans memory
    arguments = trainable(CASES[case](3, torch.float32))
    outputs = tree_flatten(overload(case)(*arguments))[0]
    grads = [torch.randn_like(x) for x in outputs]
    found = torch.autograd.grad(outputs, leaves(arguments), grads)
    for x, grad in zip(leaves(arguments), found, strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype
    addresses = [x.untyped_storage().data_ptr() for x in (*found, *grads)]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("case", CASES)
def test_gradients_in_bf16(case: str):
    arguments = CASES[case](8, torch.bfloat16)
    own = trainable(arguments)
    got, inputs = gradients(case, own), leaves(own)
    wide = tree_map_only(torch.dtype, lambda _: torch.float64, arguments)
    wide = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, wide)
    for i, (grad, want) in enumerate(zip(got, gradients(case, trainable(wide)), strict=True)):
        assert grad.dtype == inputs[i].dtype
        assert rel_error(grad, want) < 4 * torch.finfo(torch.bfloat16).eps, f"input {i}"


def test_a_gradient_that_only_one_output_needs():
    x, y, scale, weight, bias, *rest = trainable(CASES["layerscale_residual_norm"](3, torch.float64))
    call = overload("layerscale_residual_norm")
    (through,) = torch.autograd.grad(call(x, y, scale, weight, bias, *rest)[0].sum(), y)
    assert torch.allclose(through, scale.expand_as(y))
    (of_bias,) = torch.autograd.grad(call(x, y, scale, weight, bias, *rest)[1].sum(), bias)
    assert torch.allclose(of_bias, torch.full_like(bias, len(x)))


@pytest.mark.parametrize("case", CASES)
def test_gradients_under_a_dispatch_mode(case: str):
    arguments = CASES[case](3, torch.float32)
    want = gradients(case, trainable(arguments))
    with FlopCounterMode(display=False):
        got = gradients(case, trainable(arguments))
    assert same(got, want)


@pytest.mark.parametrize("case", CASES)
def test_autocast_changes_nothing(case: str):
    # the fake knows of no autocast, so neither may eager code
    arguments = CASES[case](3, torch.float32)
    want = overload(case)(*arguments), gradients(case, trainable(arguments))
    with torch.autocast("cpu", torch.bfloat16):
        assert same((overload(case)(*arguments), gradients(case, trainable(arguments))), want)


@pytest.mark.parametrize("case", ["gelu", "layer_norm"])
def test_second_derivatives_are_right_or_refused(case: str):
    arguments = trainable(CASES[case](3, torch.float64))
    gelu, layer_norm = torch.nn.functional.gelu, torch.nn.functional.layer_norm
    plain = {"gelu": gelu, "layer_norm": lambda x, w, b, eps, _: layer_norm(x, [6], w, b, eps)}

    def penalty(function: Callable) -> Tensor:
        out = function(*arguments).square().sum()
        (slope,) = torch.autograd.grad(out, arguments[0], create_graph=True)
        return torch.autograd.grad(out + slope.square().sum(), arguments[0])[0]

    try:
        got = penalty(overload(case))
    except RuntimeError as refusal:
        assert case in str(refusal)
        return
    assert torch.allclose(got, penalty(plain[case]))


@pytest.mark.parametrize("case", INPLACE)
def test_in_place_refuses_to_lose_a_gradient(case: str):
    arguments, op = CASES[case](3, torch.float32), overload(case, "_")
    name = case.split("/")[0]
    for i in range(len(leaves(trainable(arguments)))):
        wanted = trainable(arguments, only=i)
        before = wanted[0].detach().clone()
        with pytest.raises(RuntimeError, match=f"{name}_ works in place .* call {name} instead"):
            op(*wanted)
        assert torch.equal(wanted[0], before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("case", INPLACE)
def test_in_place_equals_functional(case: str, dtype: torch.dtype, mode: Callable):
    arguments = CASES[case](5, dtype)
    want = tree_flatten(overload(case)(*arguments))[0]
    if mode is not torch.enable_grad:
        arguments = trainable(arguments)
    with mode():
        result = overload(case, "_")(*arguments)
    x = arguments[0].detach()
    assert torch.equal(x[:, : want[0].shape[1]], want[0])
    assert result is None if len(want) == 1 else torch.equal(result, want[1])


@pytest.mark.parametrize("case", INPLACE)
def test_in_place_is_seen_by_autograd(case: str):
    x, *rest = CASES[case](3, torch.float32)
    weight = torch.ones_like(x, requires_grad=True)
    product = weight * x
    view, version = x[1:], x._version
    overload(case, "_")(x, *rest)
    assert x._version == view._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("name", [name for name in ops.OPS if name.removesuffix("_") in NAMES])
def test_integers_are_refused(name: str):
    arguments = CASES[name.removesuffix("_")](3, torch.float32)
    with pytest.raises(ValueError, match="floating point"):
        overload(name)(*tree_map_only(Tensor, lambda x: x.int(), arguments))


def test_what_a_launcher_writes_is_counted():
    # a kernel writes behind autograd's back: only define_inplace can count it
    def kernel(x: Tensor) -> None:
        x.numpy()[:] = 0

    _common.define_inplace("written_by_test_(Tensor(a!) x) -> ()", kernel, lambda x: None)
    x = torch.ones(3)
    version = x._version
    torch.ops.radio_triton.written_by_test_(x)
    assert not x.any() and x._version > version


def mark_counts(case: str, arguments: Arguments) -> Arguments:
    """Say, as RadioModel does, that the dimensions that grow with the number of tokens are dynamic."""
    other = CASES[case](3, torch.float32)
    for x, y in zip(tree_flatten(arguments)[0], tree_flatten(other)[0], strict=True):
        if isinstance(x, Tensor) and x.shape != y.shape:
            torch._dynamo.mark_dynamic(x, 0)
    return arguments


@pytest.mark.parametrize("trains", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("case", CASES)
def test_one_compilation_for_any_count(case: str, trains: bool):
    torch._dynamo.reset()
    op, counter = overload(case), CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda *arguments: op(*arguments), backend=counter, fullgraph=True)
    for n in (4, 2, 9, 7):
        arguments = CASES[case](n, torch.float32)
        arguments = mark_counts(case, trainable(arguments) if trains else arguments)
        assert same(call(*arguments), op(*arguments))
        if trains:
            assert same(gradients(case, arguments, call), gradients(case, arguments))
    assert counter.frame_count == 1


@pytest.mark.parametrize("case", INPLACE)
def test_one_compilation_in_place(case: str):
    torch._dynamo.reset()
    op, counter = overload(case, "_"), CompileCounterWithBackend("aot_eager")

    def function(x: Tensor, *rest: Any) -> tuple[Tensor, Any]:
        # a read before the write and one after it: neither may move
        before = x + 1
        result = op(x, *rest)
        return before, x + 1, result

    call = torch.compile(function, backend=counter, fullgraph=True)
    for n in (4, 2, 9, 7):
        x, *rest = CASES[case](n, torch.float32)
        copy = x.clone()
        mark_counts(case, (x, *rest))
        assert same(call(x, *rest), function(copy, *rest))
        assert torch.equal(x, copy)
    assert counter.frame_count == 1
