"""Does a trainer, anyone's, compute what it says? Checks of its functions against plain loops and known traps.

    pytest --pyargs rlkit.conformance --trainer my_adapter:Trainer

An adapter is a class with some of the methods of `rlkit.conformance.adapter.Adapter`. Each check says whether the
trainer computes what the loops compute, made another choice, or has a bug. See docs/conformance.md.
"""
