import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same random tensors, whatever ran before it in its process."""
    torch.manual_seed(0)
