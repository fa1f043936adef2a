"""Rewards as somebody may write them; `test_misbehaving_rewards.py` runs them in worker processes."""

import contextlib
import ctypes
import io
import os
import sys
import time

import PIL  # noqa: F401, `importing_later` imports more of it

kept = []


def well(text, row):
    return float(text == row["answer"])


def on_ill_text(text, row):
    """Misbehaves as the response says; else judges."""
    match text:
        case "loop":
            while True:
                pass
        case "sleep":
            time.sleep(1000)
        case "exit":
            os._exit(7)
        case "sys.exit":
            sys.exit("by mistake")
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "fork":
            os.fork()
        case "fork and hang":
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(1)
        case "memory":
            kept.append(bytearray(10 << 30))
        case "memory in pieces":
            while True:
                kept.append(bytearray(64 << 20))
        case "64 MB":
            bytearray(64 << 20)
        case "output":
            print("x" * (1 << 20))
            sys.stderr.write("y" * (1 << 20))
            os.write(1, b"z" * (1 << 20))
        case "input":
            return float(len(sys.stdin.read()))
        case "raise":
            raise KeyError("mine")
        case "interrupt":
            raise KeyboardInterrupt
        case "recursion":
            return on_ill_text(text, row)
        case "text":
            return "high"
        case "none":
            return None
        case "close":
            os.closerange(3, 64)
    return float(text == row["answer"])


def executing(text, row):
    """Executes the response, which may set its reward; otherwise 1 if it prints ESCAPED or the row's secret, else 0."""
    names, printed = {"row": row}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(text, names)
    leaked = "ESCAPED" in printed.getvalue() or row.get("secret", "ESCAPED") in printed.getvalue()
    return names.get("reward", float(leaked))


def importing_later(text, row):
    from PIL import ImageChops

    return float(ImageChops.__name__ == "PIL.ImageChops")


def with_the_process_id(text, row):
    return float(os.getpid())
