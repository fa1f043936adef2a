"""A second device on a machine without a GPU: tensors on `gpu` are not in host memory, as those on a GPU are not.

An operation that mixes tensors of both devices raises, as on a GPU. Whatever makes the host wait for the device is
counted: a look at a number, a mask as an index, a copy to the host.

Weights and pixels have no values, and what is computed with them has none: reading it gives 1. Integers and booleans,
and what is computed from them alone, have values in `shadow`, as the code of models branches on sizes of images.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from contextlib import nullcontext

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}
SIZED_BY_VALUES = {
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.masked_select.default,
    aten._unique2.default,
}
INDEXES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class _Backend(_DummyBackendModule):
    """What torch asks of a device's module."""

    class Stream:
        def __init__(self, *args, **kwargs):
            pass

        def _ignore(self, *args, **kwargs):
            return self

        wait_stream = wait_event = record_event = record = synchronize = wait = _ignore

    Event = Stream

    def stream(self, stream):
        return nullcontext(stream)

    def current_stream(self, device=None):
        return self.Stream()

    def set_device(self, device):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend("gpu", backend_module=_Backend())
HOST, GPU = torch.device("cpu"), torch.device("gpu", 0)


def is_on_gpu(x):
    return isinstance(x, FakeTensor) and x.device.type == "gpu"


class SimulatedGpu(FakeTensorMode):
    """Inside, `model.to("gpu")` and `x.to("gpu")` put tensors on the simulated device.

    Attributes:
        waits: how often the host waited for the device: for `rlkit`, `transformers` and `backward` by the innermost
            function there and by what it did.
    """

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        self.waits = defaultdict(Counter)
        self.depth = 0

    @property
    def avoid_device_init(self):
        return True  # torch.tensor(..., device="gpu") comes here as a copy from the host

    def __enter__(self):
        self.depth += 1
        return super().__enter__()

    def __exit__(self, *error):
        self.depth -= 1
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default or self.depth > 1:
            return super().__torch_dispatch__(func, types, args, kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, DTensor) for x in tensors):
            return NotImplemented  # it calls the operation again, with its parts
        on_gpu = [x for x in tensors if is_on_gpu(x)]
        target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if not on_gpu and (target is None or target.type == "cpu"):
            return func(*args, **kwargs)
        if not tensors:
            return self._with_values(func, args, kwargs)
        if not on_gpu:
            return self._to_device(func, args, kwargs)
        if target is not None and target.type == "cpu":
            return self._to_host(func, args, kwargs)
        if func is aten.copy_.default and args[0].device != args[1].device:
            return self._copy_across(*args, **kwargs)
        self._check_devices(func, args, tensors)
        if all(hasattr(x, "shadow") for x in on_gpu):
            return self._with_values(func, args, kwargs)
        return self._without_values(func, types, args, kwargs)

    def _check_devices(self, func, args, tensors):
        on_host = [x for x in tensors if not is_on_gpu(x) and x.ndim]  # a single number is an argument of the kernel
        if func in INDEXES:
            if any(isinstance(i, Tensor) and not is_on_gpu(i) for i in args[1]):
                self._count("index from the host")
            on_host = [x for x in (args[0], *args[2:]) if isinstance(x, Tensor) and not is_on_gpu(x) and x.ndim]
        if on_host:
            raise RuntimeError(
                f"{func}: expected tensors on gpu, got one on the host of shape {tuple(on_host[0].shape)}"
            )

    def _with_values(self, func, args, kwargs):
        """Computes with the values of integers."""
        if func in READS | SIZED_BY_VALUES or (func in INDEXES and _masks(args)):
            self._count(str(func))
        kwargs = {**kwargs, "device": HOST} if "device" in kwargs else kwargs
        real_args, real_kwargs = tree_map(lambda x: x.shadow if is_on_gpu(x) else x, (args, kwargs))
        result = func(*real_args, **real_kwargs)
        if any(result is x for x in real_args[:1]):  # in place
            return args[0]
        return tree_map(lambda x: self._on_device(x) if isinstance(x, Tensor) else x, result)

    def _without_values(self, func, types, args, kwargs):
        if func in READS:
            self._count(str(func))
            return 1 if args[0].dtype.is_floating_point else True
        if func in INDEXES and (masks := _masks(args)):
            self._count(f"{func} with a mask")
            if all(hasattr(mask, "shadow") for mask in masks):
                args = (args[0], _positions(args[1], self._on_device), *args[2:])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _to_device(self, func, args, kwargs):
        """A tensor from the host, or one like it, on the device."""
        if func is aten._to_copy.default and not kwargs.get("non_blocking"):
            self._count("copy to the device")
        return self._on_device(func(*args, **{**kwargs, "device": HOST}), values=not args[0].is_floating_point())

    def _to_host(self, func, args, kwargs):
        if not kwargs.get("non_blocking"):
            self._count("copy to the host")
        return func(*tree_map(lambda x: _values(x) if is_on_gpu(x) else x, args), **kwargs)

    def _copy_across(self, target, source, non_blocking=False):
        if is_on_gpu(target):
            if hasattr(target, "shadow"):
                target.shadow.copy_(source)
        else:
            if not non_blocking:
                self._count("copy to the host")
            target.copy_(_values(source))
        return target

    def _on_device(self, real, *, values=True):
        options = {"dtype": real.dtype, "device": GPU}
        found = super().__torch_dispatch__(aten.empty_strided.default, (), (real.shape, real.stride()), options)
        if values:
            found.shadow = real
        return found

    def _count(self, what):
        for frame in reversed(traceback.extract_stack()):
            package = next((name for name in ("rlkit", "transformers") if f"/{name}/" in frame.filename), "")
            if package and not frame.name.startswith("<"):  # as <listcomp> does
                self.waits[package][f"{frame.name}: {what}"] += 1
                return
        self.waits["backward"][what] += 1  # of autograd, which has no frames of Python


def _values(x):
    return x.shadow if hasattr(x, "shadow") else torch.ones(x.shape, dtype=x.dtype)


def _masks(args):
    return [i for i in args[1] if isinstance(i, Tensor) and i.dtype == torch.bool]


def _positions(indices, on_device):
    """The indices, with each mask replaced by the positions of its True entries."""
    found = []
    for index in indices:
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
        found += [on_device(x) for x in index.shadow.nonzero(as_tuple=True)] if is_mask else [index]
    return found
