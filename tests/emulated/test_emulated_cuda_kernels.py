"""What CUDA has a kernel for and the CPU has not: recurrent cells, batch norm in parts and in mixed precision."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.emulated_device import DEVICE
from torch import Tensor, nn


def trained(module: nn.Module, run: Callable[[nn.Module, str], Tensor], device: str) -> list[Tensor]:
    """The output, and the gradient of each parameter."""
    module = copy.deepcopy(module).to(device)
    output = run(module, device)
    output.square().sum().backward()
    return [output.detach().cpu(), *(p.grad.cpu() for p in module.parameters() if p.grad is not None)]


def assert_close(module: nn.Module, run: Callable[[nn.Module, str], Tensor]) -> None:
    expected, found = trained(module, run, "cpu"), trained(module, run, DEVICE)
    assert len(found) == len(list(module.parameters())) + 1
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_network_trains_as_on_the_cpu(kind: type[nn.RNNBase], bias: bool) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(5, 2, 4)
    # With fused cells, the biases are added in another order: not the same bits.
    assert_close(kind(4, 3, 2, bias=bias, bidirectional=True), lambda module, device: module(inputs.to(device))[0])


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_a_recurrent_cell_trains_as_on_the_cpu(kind: type[nn.RNNCellBase]) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 4)

    def run(module: nn.Module, device: str) -> Tensor:
        state = module(inputs.to(device))
        return state if isinstance(state, Tensor) else torch.cat(state)

    assert_close(kind(4, 3), run)


def test_a_packed_sequence_goes_through_an_lstm() -> None:
    torch.manual_seed(0)
    inputs, lengths = torch.randn(5, 2, 4), torch.tensor([5, 3])

    def run(module: nn.Module, device: str) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(inputs.to(device), lengths)
        return module(packed)[0].data

    assert_close(nn.LSTM(4, 3), run)


def test_the_second_derivative_of_an_lstm_is_that_of_the_cpu() -> None:
    torch.manual_seed(0)
    cell, inputs = nn.LSTMCell(4, 3), torch.randn(2, 4)

    def second(device: str) -> Tensor:
        x = inputs.to(device, copy=True).requires_grad_()
        (first,) = torch.autograd.grad(copy.deepcopy(cell).to(device)(x)[0].sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0].cpu()

    torch.testing.assert_close(second(DEVICE), second("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_norm_takes_weights_in_half_precision_beside_buffers_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.BatchNorm1d(4).to(DEVICE)
    reference = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    inputs = torch.randn(6, 4, device=DEVICE, dtype=dtype)
    output = module(inputs)
    expected = reference(inputs.float())
    torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)
    output.float().square().sum().backward()
    expected.square().sum().backward()
    assert output.dtype == module.weight.grad.dtype == module.bias.grad.dtype == dtype
    assert module.running_mean.dtype == torch.float32
    torch.testing.assert_close(module.running_var, reference.running_var)
    torch.testing.assert_close(module.weight.grad.float(), reference.weight.grad, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradients_of_batch_norm_in_two_dimensions_want_buffers_of_the_weights_dtype(dtype: torch.dtype) -> None:
    module = nn.BatchNorm2d(4).to(DEVICE)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    inputs = torch.randn(6, 4, 2, 2, device=DEVICE, dtype=dtype, requires_grad=True)
    name = str(dtype).replace("torch.bfloat16", "BFloat16").replace("torch.float16", "Half")
    with pytest.raises(RuntimeError, match=f"Expected running_mean to have type {name} but got Float"):
        module(inputs).sum().backward()
    module(inputs.to(memory_format=torch.channels_last)).sum().backward()
    assert inputs.grad is not None


def test_the_parts_of_batch_norm_add_up_to_it() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(6, 3, 2, device=DEVICE)
    halves = inputs.split([2, 4])
    parts = [torch.batch_norm_stats(half, 1e-5) for half in halves]
    means, invstds = (torch.stack(each) for each in zip(*parts, strict=True))
    counts = torch.tensor([4.0, 8.0], device=DEVICE)
    running_mean, running_var = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        inputs, means, invstds, running_mean, running_var, 0.1, 1e-5, counts
    )
    whole = nn.BatchNorm1d(3).to(DEVICE)
    torch.testing.assert_close(torch.batch_norm_elemt(inputs, None, None, mean, invstd, 1e-5), whole(inputs))
    torch.testing.assert_close((running_mean, running_var), (whole.running_mean, whole.running_var))
