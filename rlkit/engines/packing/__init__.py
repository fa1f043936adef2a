"""Micro-batches and packed rows, with the attention and the sequence parallelism that work on packed rows."""
