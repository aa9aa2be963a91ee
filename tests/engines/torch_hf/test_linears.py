"""Linear layers of many rows in 16 bits and int8, on processors that multiply bfloat16 and on others."""

from __future__ import annotations

import pytest
import torch

from ctxreuse.engines.torch_hf import linears
from ctxreuse.engines.torch_hf.linears import install_linears


@pytest.fixture(params=[True, False], ids=["multiplies", "does not"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the processor multiplies bfloat16; either computes right on any."""
    monkeypatch.setattr(linears, "_has_products", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 40, 130])
def test_layers_give_what_float64_gives(rows: int, dtype: torch.dtype, int8: bool, bias: bool, products: bool) -> None:
    torch.manual_seed(rows)
    layer = torch.nn.Sequential(torch.nn.Linear(96, 75, bias=bias))
    if int8:  # whole numbers, so that int8 weights lose nothing
        layer[0].weight.data = torch.randint(-126, 127, (75, 96)) / 127
        layer[0].weight.data[:, 0] = 1
    layer = layer.to(dtype)
    x = torch.randn(2, rows, 96).to(dtype)
    weight = (layer[0].weight.float() * 127).round() / 127 if int8 else layer[0].weight
    expected = torch.nn.functional.linear(x.double(), weight.double(), layer[0].bias.double() if bias else None)
    install_linears(layer, int8=int8)
    with torch.inference_mode():
        got = layer(x)
    assert got.dtype == dtype
    assert (got.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()


def test_training_sees_plain_layers(products: bool) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(96, 75).bfloat16())
    install_linears(layer)
    layer(torch.randn(130, 96).bfloat16()).sum().backward()
    assert layer[0].weight.grad is not None


@pytest.mark.parametrize("rows", [2, 40])
def test_gradients_go_through_int8_weights(rows: int, products: bool) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(96, 75))
    install_linears(layer, int8=True)
    x = torch.randn(rows, 96, requires_grad=True)
    layer(x).sum().backward()
    with torch.inference_mode():
        expected = layer(torch.eye(96)).sum(1)
    bias = layer[0].bias.detach().sum()
    assert x.grad is not None
    assert torch.allclose(x.grad, (expected - bias).expand(rows, 96), atol=1e-4)
