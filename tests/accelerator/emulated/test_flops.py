import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_cephalo.emulation import EmulatedDevice


def test_linear_costs_two_flops_per_weight_and_sample_and_twice_that_backward():
    layer = nn.Linear(24, 40)
    batch = torch.randn(6, 24, requires_grad=True)
    with EmulatedDevice() as device:
        result = layer(batch)
        assert device.flops == 2 * 6 * 24 * 40
        result.sum().backward()
    assert device.flops == 3 * 2 * 6 * 24 * 40


def test_first_layer_has_no_gradient_of_its_input():
    layer = nn.Linear(24, 40)
    with EmulatedDevice() as device:
        layer(torch.randn(6, 24)).sum().backward()
    assert device.flops == 2 * 2 * 6 * 24 * 40


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_two_products_forward_and_five_backward(is_causal):
    samples, heads, length, width = 2, 3, 16, 8
    query, key, value = (
        torch.randn(samples, heads, length, width, requires_grad=True) for _ in range(3)
    )
    product = 2 * samples * heads * length * length * width
    with EmulatedDevice() as device:
        result = functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        assert device.flops == 2 * product
        result.sum().backward()
    assert device.flops == 7 * product


def test_attention_with_fewer_key_heads_and_another_length():
    query = torch.randn(2, 4, 16, 8)
    key, value = torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    with EmulatedDevice() as device:
        functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    assert device.flops == 2 * (2 * 2 * 4 * 16 * 12 * 8)


def test_convolution_counts():
    layer = nn.Conv2d(3, 8, 3, padding=1)
    with EmulatedDevice() as device:
        layer(torch.randn(2, 3, 10, 10))
    assert device.flops == 2 * 2 * 10 * 10 * 8 * 3 * 3 * 3


def test_recomputation_counts_again():
    layer = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    batch = torch.randn(4, 16, requires_grad=True)
    with EmulatedDevice() as device:
        checkpoint(layer, batch, use_reentrant=False).sum().backward()
    assert device.flops == 4 * (2 * 4 * 16 * 16)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_flops_do_not_depend_on_the_grad_mode(context):
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    batch = torch.randn(2, 5, 16)
    with EmulatedDevice() as device, context():
        layer(batch, batch, batch, need_weights=False)
    products = 4 * (2 * 10 * 16 * 16) + 2 * (2 * 2 * 2 * 5 * 5 * 8)
    assert device.flops == products


def test_the_same_shapes_again_and_other_shapes_in_between():
    with EmulatedDevice() as device:
        for width in (4, 8, 4, 8):
            torch.randn(2, width) @ torch.randn(width, 3)
    assert device.flops == 2 * (2 * 2 * 4 * 3) + 2 * (2 * 2 * 8 * 3)


def test_fake_and_meta_tensors_cost_nothing():
    with EmulatedDevice(flops_per_s=1.0) as device:
        with FakeTensorMode():
            torch.empty(10**4, 10**4) @ torch.empty(10**4, 10**4)
        torch.empty(10**4, 10**4, device="meta") @ torch.empty(10**4, 10**4, device="meta")
        assert device.flops == 0
        assert device.current_bytes == 0


def test_busy_seconds_are_flops_over_rate_plus_bytes_over_bandwidth():
    left, right = torch.randn(8, 16), torch.randn(16, 4)
    with EmulatedDevice(flops_per_s=1e9, bytes_per_s=1e8) as device:
        torch.mm(left, right)
        assert device.busy_s == pytest.approx(
            2 * 8 * 16 * 4 / 1e9 + 4 * (8 * 16 + 16 * 4 + 8 * 4) / 1e8
        )
        before_s = device.busy_s
        left.view(16, 8).t()
        torch.empty(1000)
        assert device.busy_s == before_s
        left.add_(1)
        assert device.busy_s == pytest.approx(before_s + 2 * 4 * 128 / 1e8)


def test_results_are_those_of_the_plain_cpu():
    layer = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    batch = torch.randn(4, 16)
    expected = torch.autograd.grad(layer(batch).square().sum(), list(layer.parameters()))
    with EmulatedDevice(flops_per_s=1e9):
        actual = torch.autograd.grad(layer(batch).square().sum(), list(layer.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_is_counted_like_an_eager_one():
    layer = nn.Linear(24, 40)
    compiled = torch.compile(layer, backend="eager")
    batch = torch.randn(6, 24)
    compiled(batch)
    with EmulatedDevice() as device:
        compiled(batch)
    assert device.flops == 2 * 6 * 24 * 40
