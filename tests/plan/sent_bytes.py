"""The bytes that a rank sends, counted while it runs."""

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(TorchDispatchMode):
    """Bytes that a rank sends in the collectives of a model, if these pass tensors around a ring.

    Attributes:
        bytes: of all tensors together.
        by_call: of the tensors of each kind of call, e.g. "alltoall_base_" for matrices and "alltoall_base_ vector".
    """

    SHARE = {"allreduce_": 2, "_allgather_base_": 1, "_reduce_scatter_base_": 1}
    SHARE |= {"allgather_into_tensor_coalesced_": 1, "reduce_scatter_tensor_coalesced_": 1}

    def __init__(self):
        super().__init__()
        self.by_call = {}

    @property
    def bytes(self):
        return sum(self.by_call.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            group = next((dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject)), None)
            if name in self.SHARE:
                tensors = args[0] if name == "allreduce_" else args[:2]
                sizes = [sum(y.nbytes for y in x) if isinstance(x, list) else x.nbytes for x in tensors]
                self._add(name, self.SHARE[name] * max(sizes) * (group.size() - 1) / group.size())
            elif name == "send":
                self._add(name, sum(x.nbytes for x in args[0]))
            elif name == "alltoall_base_":
                _, tensor, _, _, rows, *_ = args  # how many of them go to each rank; none: equal parts
                own = rows[group.rank()] / max(sum(rows), 1) if rows else 1 / group.size()
                self._add(name if tensor.ndim > 1 else f"{name} vector", tensor.nbytes * (1 - own))
        if func is torch.ops._c10d_functional.all_reduce.default:  # of DTensors
            tensor, _, group_name = args
            size = dist.distributed_c10d._resolve_process_group(group_name).size()
            self._add(name, 2 * tensor.nbytes * (size - 1) / size)
        return func(*args, **(kwargs or {}))

    def _add(self, call, size):
        self.by_call[call] = self.by_call.get(call, 0) + size
