"""Checks whether any trainer's functions compute what they claim: against plain loops, and for well-known bugs.

    pytest --pyargs rlkit.conformance --trainer my_adapter:Trainer

An adapter is a class with some of the methods of `rlkit.conformance.adapter.Adapter`. For each check the trainer agrees
with the reference loops, made another legitimate choice, or has a bug. See docs/conformance.md.
"""
