"""What a call takes of a process's memory."""

import re
import threading
from pathlib import Path


def peak(function):
    """Bytes that this process takes at most beyond what it had, as the kernel counts; and what the function returns."""

    def taken():
        return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    seen, done = [taken()], threading.Event()

    def watch():
        while not done.wait(0.001):
            seen.append(taken())

    watching = threading.Thread(target=watch)
    watching.start()
    result = function()
    done.set()
    watching.join()
    return max(seen) - seen[0], result
