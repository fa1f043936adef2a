"""The Triton kernels of `linear_logprobs` on a GPU, compared with float64: `pytest -m gpu`. Not run yet."""

import pytest
import torch

from rlkit.losses import _kernels, linear_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias_and_suppressed", [False, True])
def test_kernels_equal_float64(dtype, bias_and_suppressed):
    g = torch.Generator("cuda").manual_seed(0)
    n, v, h = 1000, 50_001, 768  # no multiples of a tile
    hidden, weight, bias = (
        torch.randn(*shape, generator=g, device="cuda").mul_(scale).to(dtype)
        for shape, scale in (((n, h), 1.0), ((v, h), 0.05), ((v,), 0.1))
    )
    targets, up = torch.randint(7, v, (n,), generator=g, device="cuda"), torch.randn(2, n, generator=g, device="cuda")
    temperature = torch.rand(n, generator=g, device="cuda") + 0.5
    assert _kernels._triton(hidden.device, dtype) is not None
    found = []
    for kind in (dtype, torch.float64):
        leaves = [x.to(kind).requires_grad_() for x in (hidden, weight, bias)[: 2 + bias_and_suppressed]]
        options = {"bias": leaves[2], "suppress": torch.arange(3, 7)} if bias_and_suppressed else {}
        logps, entropy = linear_logprobs(leaves[0], leaves[1], targets, temperature, chunk=300, **options)
        gradients = torch.autograd.grad((logps * up[0] + entropy * up[1]).sum(), leaves)
        found.append([logps.detach(), entropy.detach(), *gradients])
    for i, (kernel, exact) in enumerate(zip(*found, strict=True)):
        error = (kernel.double() - exact).abs().max() / exact.abs().max()
        assert error < (1e-5 if i < 2 or dtype == torch.float32 else 2e-2)
