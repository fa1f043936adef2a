"""The functions of `rlkit.losses` as plain loops over rows and tokens, in float64.

Each module here has the functions of the module of the same name, under the same names and with the same arguments:

    from rlkit.losses.naive.policy import clipped_policy_loss

Slow, and right by inspection. Nothing is shared with the fast functions; the tests compare values and gradients of each
with these. Arguments are not checked, and log-ratios have no limit of +-20.
"""
