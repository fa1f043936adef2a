"""Started by `test_directory.py`: claims the directory that each line of its input names, and responses with a line.

A line is [out, name, resume]; "fork" leaves a child behind that does nothing, and responses with its process id.
"""

import json
import os
import signal
import sys

from rlkit.runs.directory import claim_directory


def response(line):
    if line == "fork":
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.write(write, b"started")
            signal.pause()
        os.read(read, 7)
        return {"child": child}
    out, name, resume = line
    try:
        return {"out": str(claim_directory(out, name, resume=resume))}
    except ValueError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(response(json.loads(line))), flush=True)
