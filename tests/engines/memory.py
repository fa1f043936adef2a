"""The peak memory of a function call."""

import re
import threading
from pathlib import Path


def peak(function):
    """The most bytes that this process held beyond what it held before the call, by the kernel; and the result."""

    def resident():
        return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    samples, done = [resident()], threading.Event()

    def watch():
        while not done.wait(0.001):
            samples.append(resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = function()
    done.set()
    watcher.join()
    return max(samples) - samples[0], result
