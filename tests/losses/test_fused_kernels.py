"""Compiled by inductor, each loss that is elementwise is one fused kernel forward and one backward."""

import inspect
import shutil

import pytest
import torch
from torch._inductor import config, metrics

import rlkit.losses as losses

ELEMENTWISE = (
    "clipped_policy_loss", "reinforce_loss", "cispo_loss", "gppo_loss", "sapo_loss", "dppo_tv_loss", "dppo_kl_loss",
    "dro_loss", "clipped_value_loss", "kl_k1", "kl_k2", "kl_k3", "kl_abs", "kl_k3_weighted", "kl_straight_through",
    "kl_binary", "dft_loss", "chord_phi_loss",
)  # fmt: skip
RATIO_OF_A_SEQUENCE = ("gspo_loss", "sequence_sapo_loss", "vespo_loss")


def kernels(name):
    """How many kernels the function is, forward and backward."""
    g = torch.Generator().manual_seed(0)
    function = getattr(losses, name)
    takes = [n for n, x in inspect.signature(function).parameters.items() if x.default is x.empty or n == "mask"]
    given = {n: -torch.rand(8, 64, generator=g) for n in takes}
    given["mask"] = torch.rand(8, 64, generator=g) < 0.7
    leaf = given["values" if "values" in given else "logprobs"].requires_grad_()
    torch._dynamo.reset()
    metrics.reset()
    with config.patch(force_disable_caches=True):  # a graph of a cache generates nothing
        out = torch.compile(function, fullgraph=True)(**given)
        forward = metrics.generated_kernel_count
        (grad,) = torch.autograd.grad(out.sum(), leaf)
    expected = function(**given)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), leaf)[0], rtol=1e-5, atol=1e-5)
    return forward, metrics.generated_kernel_count - forward


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on a CPU")
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_one_kernel_each_way(name):
    assert kernels(name) == (1, 1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on a CPU")
@pytest.mark.parametrize("name", RATIO_OF_A_SEQUENCE)
def test_a_sum_over_tokens_is_counted(name):
    """The count can tell: these are more than one kernel."""
    assert kernels(name)[0] > 1
