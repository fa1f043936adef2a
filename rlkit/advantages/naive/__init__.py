"""The functions of `rlkit.advantages` as plain loops over samples and tokens, in float64.

Each module here has the functions of the module of the same name, under the same names and with the same arguments:

    from rlkit.advantages.naive.returns import gae

Slow, and right by inspection. Nothing is shared with the fast functions; the tests compare values and gradients of each
with these. Arguments are not checked.
"""
