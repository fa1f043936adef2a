"""Run by `test_triton.py`: the Triton kernels in Triton's interpreter, on a CPU, compared with the plain loops.

on_interpreted_kernels.py OUT_FILE
"""

import json
import os
import sys
import tempfile
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from triton.runtime import interpreter

from rlkit.engines.megatron import vocab_parallel
from rlkit.engines.megatron.vocab_parallel import vocab_parallel_linear_logprobs
from rlkit.losses import _triton, linear_logprobs, logprobs
from rlkit.losses.naive import logprobs as naive

BLOCK = 16
counted = {"flops": 0, "read": 0, "written": 0}


def count_and_convert(builder):
    """Count products, reads and writes. The interpreter multiplies the bits of bfloat16 as integers; here as floats."""
    dot, load, store = builder.create_dot, builder.create_masked_load, builder.create_masked_store

    def as_floats(x):
        is_bfloat16 = x.data.dtype == np.uint16
        data = (x.data.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else x.data
        return interpreter.TensorHandle(data, interpreter.tl.float32 if is_bfloat16 else x.dtype)

    def counted_dot(a, b, d, *options):
        counted["flops"] += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
        return dot(as_floats(a), as_floats(b), d, *options)

    def counted_load(pointers, mask, *options):
        out = load(pointers, mask, *options)
        counted["read"] += int(mask.data.sum()) * out.data.itemsize
        return out

    def counted_store(pointers, value, mask, *options):
        counted["written"] += int(mask.data.sum()) * value.data.itemsize
        return store(pointers, value, mask, *options)

    builder.create_dot, builder.create_masked_load, builder.create_masked_store = (
        counted_dot,
        counted_load,
        counted_store,
    )


def problem(n=18, v=41, h=21, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*x, generator=g).to(dtype) for x in ((n, h), (v, h), (v,)))
    targets = torch.randint(0, v, (n,), generator=g)
    temperature = torch.rand(n, generator=g) + 0.5
    return hidden, weight, bias, targets, temperature, torch.randn(2, n, generator=g)


def error(x, y):
    """Largest difference, relative to the largest number."""
    return float((x.double() - y.double()).abs().max() / y.double().abs().max())


def results_and_gradients(function, tensors, targets, temperature, grads, **options):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    bias = {"bias": leaves[2]} if len(leaves) == 3 else {}
    logps, entropy = function(*leaves[:2], targets, temperature, **bias, **options)
    total = (logps * grads[0] + entropy * grads[1]).sum()
    return [logps.detach(), entropy.detach(), *torch.autograd.grad(total, leaves)]


def equals_loops(dtype, with_bias, suppress, per_token, chunk):
    """Largest errors of (logprobs, entropy, gradients of hidden, weight and bias)."""
    hidden, weight, bias, targets, temperature, grads = problem(5, 19, 9, dtype)
    suppress = torch.tensor(suppress) if suppress else None
    tensors = (hidden, weight, bias) if with_bias else (hidden, weight)
    tau = temperature if per_token else 0.7
    args = targets.clamp(3, 16), tau, grads
    found = results_and_gradients(linear_logprobs, tensors, *args, suppress=suppress, chunk=chunk)
    exact = [x.double() for x in tensors]
    loops = results_and_gradients(naive.linear_logprobs, exact, *args, suppress=suppress)
    return [error(x, y) for x, y in zip(found, loops, strict=True)]


def equals_the_whole_in_shards():
    """Sums and gradients of two shards of the vocabulary, of unequal sizes, combined as ranks would."""
    hidden, weight, bias, targets, temperature, grads = problem()
    tau, suppressed = temperature[:, None], torch.zeros(41, dtype=torch.uint8)
    suppressed[[2, 30]] = 1
    targets = torch.where(suppressed[targets] == 1, 5, targets)
    shards = [(slice(0, 24), 0), (slice(24, 41), 24)]
    of_shard = [(hidden, weight[rows], bias[rows], targets - first, tau, suppressed[rows]) for rows, first in shards]
    sums = torch.cat([_triton.vocabulary_sums(*shard) for shard in of_shard], 1)
    logps, entropy, log_total = _triton.merge(sums)
    in_parts = _triton.merge(_triton.vocabulary_sums(hidden, weight, bias, targets, tau, suppressed, parts=3))
    gradients = [
        _triton.logit_gradients(h, w, b, s, y, tau, log_total, entropy, *grads) for h, w, b, y, _, s in of_shard
    ]
    d_logits = torch.cat(gradients, 1)
    options = {"suppress": torch.tensor([2, 30])}
    whole = results_and_gradients(
        naive_by_matrices, (hidden.double(), weight.double(), bias.double()), targets, temperature, grads, **options
    )
    found = [logps, entropy, d_logits @ weight, d_logits.t() @ hidden, d_logits.sum(0)]
    pairs = [*zip(found, whole, strict=True), *zip(in_parts[:2], whole[:2], strict=True)]
    return [error(x, y) for x, y in pairs]


def sharded_problem(dtype):
    """42 vocabulary entries, of which 3 and 40 are suppressed and no targets."""
    *tensors, targets, temperature, grads = problem(v=42, dtype=dtype)
    return *tensors, targets.masked_fill((targets == 3) | (targets == 40), 30), temperature, grads


def on_rank(rank, world, folder, dtype):
    """This rank's slice of a vocabulary: logprobs, entropy and gradients from Megatron's head, and its FLOPs."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    hidden, weight, _, targets, _, grads = sharded_problem(dtype)
    tensors = (hidden, weight.chunk(world)[rank])
    counted.update(dict.fromkeys(counted, 0))
    found = results_and_gradients(
        vocab_parallel_linear_logprobs, tensors, targets, 0.7, grads, suppress=torch.tensor([3, 40]), chunk=7
    )
    torch.save((found, counted["flops"]), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def equals_the_whole_on_two_ranks(dtype):
    """Errors of the results and gradients of two ranks that share the vocabulary, and the FLOPs of the kernels."""
    hidden, weight, _, targets, _, grads = sharded_problem(dtype)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(on_rank, (2, folder, dtype), nprocs=2, start_method="fork")
        ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(2)]
    options = {"suppress": torch.tensor([3, 40]), "bias": torch.zeros(42)}
    tensors, temperature = (hidden.double(), weight.double()), torch.full((len(targets),), 0.7)
    whole = results_and_gradients(naive_by_matrices, tensors, targets, temperature, grads, **options)
    (one, _), (other, _) = ranks
    joined = [one[0], one[1], one[2].double() + other[2].double(), torch.cat([one[3], other[3]])]
    errors = [error(x, y) for x, y in zip([*joined, *other[:2]], [*whole, *whole[:2]], strict=True)]
    return {"errors": errors, "flops": [flops for _, flops in ranks]}


def naive_by_matrices(hidden, weight, targets, temperature, bias, suppress):
    logits = (hidden @ weight.t() + bias) / temperature[:, None]
    logp = logits.index_fill(1, suppress, -torch.inf).log_softmax(1)
    kept = logp.index_fill(1, suppress, 0.0)
    return logp.gather(1, targets[:, None])[:, 0], -(kept.exp() * logp.clamp(min=-1e30)).index_fill(1, suppress, 0).sum(
        1
    )


def tied_and_strided():
    """The head is the embedding, whose gradient is the sum of both uses; rows of the hidden states lie apart."""
    _, weight, _, targets, _, grads = problem(n=18, h=21)

    def run(function, table):
        table = table.detach().requires_grad_()
        hidden = (table[targets.flip(0)] * 2).repeat(1, 2)[:, ::2][:, :21]
        logps, entropy = function(hidden, table, targets)
        return torch.autograd.grad((logps * grads[0] + entropy * grads[1]).sum(), table)[0]

    plain = run(
        lambda h, w, y: naive_by_matrices(h, w, y, torch.ones(18), torch.zeros(41), torch.tensor([], dtype=torch.long)),
        weight.double(),
    )
    return error(run(linear_logprobs, weight), plain)


def strided_vectors():
    """Largest errors with targets and a bias whose numbers lie apart in memory, and with one target for all tokens."""
    hidden, weight, bias, targets, _, grads = problem()
    targets_apart, bias_apart = (torch.stack([x, x + 1], 1)[:, 0] for x in (targets, bias))
    errors = []
    for chosen in (targets_apart, torch.tensor(5).expand(18)):
        leaf = bias_apart.detach().requires_grad_()
        logps, entropy = linear_logprobs(hidden, weight, chosen, bias=leaf)
        (gradient,) = torch.autograd.grad((logps * grads[0] + entropy * grads[1]).sum(), leaf)
        exact = [x.double() for x in (hidden, weight, bias)]
        loops = results_and_gradients(naive.linear_logprobs, exact, chosen, 1.0, grads)
        errors += [error(logps, loops[0]), error(entropy, loops[1]), error(gradient, loops[-1])]
    return errors


def counts():
    """FLOPs and bytes of a forward and a backward, where all sizes are multiples of a tile."""
    n, v, h = 2 * BLOCK, 5 * BLOCK, 4 * BLOCK
    hidden, weight, _, targets, temperature, grads = problem(n, v, h, torch.bfloat16)
    hidden, weight = (x.requires_grad_() for x in (hidden, weight))
    found = {"n": n, "v": v, "h": h, "block": BLOCK}
    counted.update(dict.fromkeys(counted, 0))
    logps, entropy = linear_logprobs(hidden, weight, targets, temperature)
    found["forward"] = dict(counted)
    counted.update(dict.fromkeys(counted, 0))
    with FlopCounterMode(display=False) as products:
        (logps * grads[0] + entropy * grads[1]).sum().backward()
    found["backward"] = {**counted, "products": products.get_total_flops()}
    return found


def main(out):
    torch.set_num_threads(1)  # a forked rank would wait for threads of OpenMP that it does not have
    count_and_convert(interpreter.interpreter_builder)
    _triton.BLOCKS.update(BLOCK_N=BLOCK, BLOCK_V=BLOCK)
    _triton.BLOCK_BYTES = 2 * BLOCK
    for module in (logprobs, vocab_parallel):
        module.kernels_for = lambda hidden: _triton if hidden.dtype in _triton.DTYPES else None
    cases = {
        "plain": (torch.float32, False, [], False, None),
        "all": (torch.float32, True, [2, 17], True, 2),
        "bfloat16": (torch.bfloat16, True, [2, 17], True, None),
        "float16": (torch.float16, False, [18], False, 4),
    }
    found = {"loops": {name: equals_loops(*case) for name, case in cases.items()}}
    found["shards"], found["tied"], found["counts"] = equals_the_whole_in_shards(), tied_and_strided(), counts()
    found["strided"] = strided_vectors()
    found["ranks"] = {str(x): equals_the_whole_on_two_ranks(x) for x in (torch.float32, torch.bfloat16)}
    hidden, weight, _, targets, _, _ = problem(2, 19, 9)
    several = torch.stack([hidden, hidden + 1])
    mapped = torch.func.vmap(lambda x: linear_logprobs(x, weight, targets))(several)
    found["vmap"] = max(
        error(mapped[i][j], linear_logprobs(several[j], weight, targets)[i]) for i in (0, 1) for j in (0, 1)
    )
    with torch.no_grad():
        dtypes = torch.float32, torch.bfloat16, torch.float64
        found["work"] = [_triton.kernels_work(torch.device("cpu"), x) for x in dtypes]
        for product in (lambda *_: 1 / 0, lambda *_: None):  # one that fails, and one that leaves zeros
            with mock.patch.object(_triton, "add_product", product):
                found["work"].append(_triton.kernels_work.__wrapped__(torch.device("cpu"), torch.float32))
    empty = linear_logprobs(hidden[:0], weight, targets[:0])
    found["empty"] = [list(x.shape) for x in empty]
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
