import pytest
import torch
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlkit.data.packing import concatenated_ranges, repad, unpad, unpad_like


def loop_unpad(x: Tensor, mask: Tensor) -> tuple[list, list[int]]:
    values, cu_seqlens = [], [0]
    for b in range(mask.shape[0]):
        values += [x[b, t] for t in range(mask.shape[1]) if mask[b, t]]
        cu_seqlens.append(len(values))
    return values, cu_seqlens


def test_golden():
    x = torch.tensor([[1, 2, 0], [0, 0, 3], [4, 0, 5], [0, 0, 0]])
    packed = unpad(x, x != 0)
    assert packed.values.tolist() == [1, 2, 3, 4, 5]
    assert packed.cu_seqlens.tolist() == [0, 2, 3, 5, 5] and packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == 2 and isinstance(packed.max_seqlen, int)
    assert packed.indices.tolist() == [0, 1, 5, 6, 8]
    assert packed.batch_shape == (4, 3)
    assert repad(packed).tolist() == x.tolist()
    assert repad(packed.values * 10, packed, fill=-1).tolist() == [[10, 20, -1], [-1, -1, 30], [40, -1, 50], [-1] * 3]
    assert unpad_like(x.double() / 2, packed).tolist() == [0.5, 1, 1.5, 2, 2.5]


def test_remove_padding_empty_row():
    """Rows in which nothing is attended, first, inside and last, keep their place."""
    mask = torch.tensor([[0, 0], [1, 1], [0, 0], [1, 0], [0, 0]])
    x = torch.arange(10.0).view(5, 2).requires_grad_()
    packed = unpad(x, mask)
    assert packed.cu_seqlens.tolist() == [0, 0, 2, 2, 3, 3]
    assert packed.values.tolist() == [2, 3, 6]
    back = repad(packed)
    assert back.tolist() == [[0, 0], [2, 3], [0, 0], [6, 0], [0, 0]]
    assert torch.equal(torch.autograd.grad(back.sum(), x)[0], mask.float())


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (3, 4)])
@pytest.mark.parametrize("trailing", [(), (2,), (1,), (0,)])
def test_nothing_to_pack(shape, trailing):
    packed = unpad(torch.ones(*shape, *trailing), torch.zeros(shape, dtype=torch.bool), lengths=[0] * shape[0])
    assert packed.values.shape == (0, *trailing)
    assert packed.cu_seqlens.tolist() == [0] * (shape[0] + 1) and packed.max_seqlen == 0
    assert repad(packed, fill=7).tolist() == torch.full((*shape, *trailing), 7.0).tolist()


@given(seed=st.integers(0, 2**32), batch=st.integers(1, 5), width=st.integers(1, 6), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_unpad_and_repad_are_inverse(seed, batch, width, data):
    generator = torch.Generator().manual_seed(seed)
    trailing = data.draw(st.sampled_from([(), (3,), (2, 1), (0,), (1,), (1, 1)]))
    kind = data.draw(st.sampled_from(["left", "right", "holes"]))
    lengths = torch.randint(0, width + 1, (batch, 1), generator=generator)
    t = torch.arange(width)
    mask = {"right": t < lengths, "left": t >= width - lengths}.get(kind)
    mask = torch.rand(batch, width, generator=generator) < 0.5 if mask is None else mask
    x = torch.randn(batch, width, *trailing, generator=generator, dtype=torch.double).requires_grad_()
    fill = data.draw(st.sampled_from([0, -2.5]))

    hint = mask.sum(1).tolist() if data.draw(st.booleans()) else None
    packed = unpad(x, mask.long() if data.draw(st.booleans()) else mask, lengths=hint)
    values, cu_seqlens = loop_unpad(x, mask)
    assert packed.values.tolist() == [value.tolist() for value in values]
    assert packed.cu_seqlens.tolist() == cu_seqlens
    assert packed.max_seqlen == max(mask.sum(1).tolist())

    back = repad(packed, fill=fill)
    spread = mask.view(batch, width, *[1] * len(trailing)).expand(x.shape)
    assert torch.equal(back, torch.where(spread, x, fill))
    assert torch.equal(unpad_like(back, packed), packed.values)
    weight = torch.randn(back.shape, generator=generator, dtype=torch.double)
    (gradient,) = torch.autograd.grad((back * weight).sum(), x)
    assert torch.equal(gradient, torch.where(spread, weight, 0))


def test_gradients_of_values():
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]]).bool()
    packed = unpad(torch.zeros(2, 3), mask)
    values = torch.randn(4, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: repad(v, packed, fill=1), values)
    x = torch.randn(2, 3, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unpad(x, mask).values, x)


def test_leading_axis_of_position_ids():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    ids = torch.arange(18).view(3, 2, 3)
    packed = unpad(rearrange(ids, "a b t -> b t a"), mask)
    assert rearrange(packed.values, "n a -> a n").tolist() == [[0, 1, 3], [6, 7, 9], [12, 13, 15]]
    assert torch.equal(rearrange(repad(packed), "b t a -> a b t"), ids * mask)


def test_dtype_and_memory_layout():
    mask = torch.tensor([[1, 0], [1, 1]])
    for dtype in (torch.bool, torch.int32, torch.bfloat16):
        x = torch.tensor([[1, 1], [0, 1]]).to(dtype).T
        packed = unpad(x, mask)
        assert packed.values.dtype == dtype and torch.equal(packed.values, x[mask.bool()])
        assert torch.equal(repad(packed), x * mask.to(dtype))


def test_lengths_spare_the_synchronisation():
    x, mask = torch.ones(2, 3, 4, device="meta"), torch.ones(2, 3, device="meta").bool()
    packed = unpad(x, mask, lengths=[2, 1])
    assert packed.values.shape == (3, 4) and packed.cu_seqlens.shape == (3,) and packed.max_seqlen == 2
    assert repad(packed).shape == (2, 3, 4) and unpad_like(mask, packed).shape == (3,)
    with pytest.raises((RuntimeError, NotImplementedError)):  # the test can tell
        unpad(x, mask)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_lengths_spare_the_synchronisation_on_cuda():
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]]).bool()
    x, on_gpu = torch.randn(2, 3, 4).cuda(), mask.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = unpad(x, on_gpu, lengths=[2, 1])
        back = repad(packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(back, x * on_gpu[..., None]) and packed.cu_seqlens.tolist() == [0, 2, 3]


X, MASK = torch.ones(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: unpad(X, MASK.float()), r"attention_mask: expected bool or integer .*, got torch.float32 \[2, 3\]"),
        (lambda: unpad(X, MASK.tolist()), "attention_mask: expected a tensor, got a list"),
        (lambda: unpad(X.tolist(), MASK), "x: expected a tensor, got a list"),
        (lambda: unpad(X, MASK[0]), r"attention_mask: .* got torch.int64 \[3\]"),
        (lambda: unpad(X.T, MASK), r"x: expected \[2, 3, \.\.\.\], got \[3, 2\]"),
        (lambda: unpad(X, MASK, lengths=[2]), "lengths: expected 2, one per row of attention_mask, got 1"),
        (lambda: unpad(X, MASK, lengths=[1, 2]), r"lengths: expected \[2, 1\] as in attention_mask, got \[1, 2\]"),
        (lambda: unpad_like(X[:1], unpad(X, MASK)), r"x: expected \[2, 3, \.\.\.\], got \[1, 3\]"),
        (lambda: repad(torch.ones(3)), "like: expected a Packed"),
        (lambda: repad(torch.ones(4), unpad(X, MASK)), r"x: expected \[3, \.\.\.\], .* got \[4\]"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("starts", "lengths"), [([], []), ([5], [0]), ([3, 0, 9], [2, 3, 1]), ([4, 4, 0, 7], [0, 2, 0, 3])]
)
def test_runs_are_ranges_end_to_end(starts, lengths):
    expected = [i for start, length in zip(starts, lengths, strict=True) for i in range(start, start + length)]
    assert concatenated_ranges(starts, lengths).tolist() == expected
