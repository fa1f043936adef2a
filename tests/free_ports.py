"""Ports on which nothing listens, for servers whose port has to be known before they start."""

import os
import socket


def free_ports(count: int = 1, address: str = "127.0.0.1") -> int:
    """The first of `count` consecutive ports that are free.

    They lie below those that the kernel hands out, so no connection of another test takes one of them meanwhile; and
    each process that runs tests begins elsewhere.
    """
    for first in range(10_000 + os.getpid() % 1000 * 20, 32_000):
        try:
            for port in range(first, first + count):
                socket.create_server((address, port)).close()
        except OSError:
            continue
        return first
    raise RuntimeError(f"expected {count} free ports from 10000 to 32000, got none")
