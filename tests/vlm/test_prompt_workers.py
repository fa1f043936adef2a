"""Prompts from worker processes are those of this process, and no process is left behind."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from failing_in_workers import NotThere, Odd
from waiting import is_running, until

from rlkit.data import load_task
from rlkit.data.samples import Sample
from rlkit.vlm import load_processor
from rlkit.vlm.prompt_workers import PromptEncoder, PromptWorkerError


def jpeg(width, height):
    pixels = np.random.default_rng((width, height)).integers(0, 256, (height, width, 3), dtype="uint8")
    Image.fromarray(pixels).save(file := io.BytesIO(), "JPEG", dpi=(72, 72))
    return file.getvalue()


def row(i, **more):
    return {"question": f"What is this, {i}?", "images": [], "answer": "7", "where": f"row {i}", **more}


@pytest.fixture(scope="module")
def rows():
    """Images of several sizes between rows of text, and some that cannot be encoded."""
    video = {"frames": np.random.default_rng(0).integers(0, 256, (4, 28, 28, 3), dtype="uint8"), "fps": 2.0}
    found = [row(i, images=[jpeg(60 + 8 * i, 40)] * (i % 3)) for i in range(8)]
    found += [row(8, images=[b"no image"]), row(9, response_prefix="<think>"), load_task("digits").train[0]]
    return found + [row(11, question="7 " * 300), row(12, images=[jpeg(30, 60)]), row(13, videos=[video])]


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


@pytest.fixture(scope="module")
def encoder(processor):
    with_workers = PromptEncoder(processor, 2)
    yield with_workers
    with_workers.close()


def result(prompt):
    try:
        return prompt()
    except ValueError as error:
        return str(error)


def plain(x):
    """What can be compared by ==, of a sample or an error."""
    if isinstance(x, Sample):
        return {name: plain(value) for name, value in vars(x).items()}
    if isinstance(x, Image.Image):
        return x.mode, x.size, x.tobytes(), x.info
    if isinstance(x, torch.Tensor | np.ndarray):
        return type(x), x.dtype, x.tolist()
    if isinstance(x, dict):
        return {name: plain(value) for name, value in x.items()}
    return [plain(one) for one in x] if isinstance(x, list | tuple) else repr(x)


def test_prompts_and_errors_are_those_of_this_process(encoder, processor, rows):
    """In the order of the rows, and with the rows themselves, which are not sent back."""
    options = {"max_tokens": 200, "dtype": torch.bfloat16}
    for _ in range(2):
        found = [result(prompt) for prompt in encoder(enumerate(rows), **options)]
        expected = [result(prompt) for prompt in PromptEncoder(processor)(enumerate(rows), **options)]
        assert found[8].startswith("row 8: image of type bytes: cannot be read: expected an image")
        assert found[11].startswith("row 11: expected a prompt of at most 200 tokens")
        assert plain(found) == plain(expected)
    assert found[9].row["thinking_opened"] and found[0].row is rows[0]
    assert not any(x.is_shared() for x in found[12].vision.values())


def test_a_row_that_cannot_be_pickled_is_named(encoder, rows):
    prompts = list(encoder(enumerate([row(3, check=lambda: 1), rows[1]])))
    expected = "^dataloader_num_workers: expected rows that can be pickled, got row 3: .*lambda.*; use 0 workers$"
    with pytest.raises(PromptWorkerError, match=expected):
        prompts[0]()
    assert prompts[1]().row is rows[1]


def test_a_processor_that_cannot_be_pickled_is_named():
    encoder = PromptEncoder(SimpleNamespace(tokenize=lambda text: []), 1)
    with pytest.raises(PromptWorkerError, match="expected a processor that can be pickled, got SimpleNamespace: "):
        list(encoder([(0, row(0))]))


def test_a_signal_that_ends_the_run_ends_no_worker_and_a_killed_one_is_named(encoder, rows):
    """Ctrl-C reaches all processes of a terminal, and the run still needs the prompts of its last step.

    This is the last test of these workers.
    """
    encode = lambda numbers: [prompt() for prompt in encoder((i, rows[i]) for i in numbers)]  # noqa: E731
    before = encode([4, 5])
    for worker in encoder.workers:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker.process.pid, number)
    assert plain(encode([4, 5])) == plain(before)
    killed = encoder.workers[0].process.pid
    os.kill(killed, signal.SIGKILL)
    expected = f"^dataloader_num_workers: expected the prompt of row [45], got the end of its worker, process {killed}"
    with pytest.raises(PromptWorkerError, match=f"{expected}, by SIGKILL; if nobody has killed it, memory or /dev/shm"):
        encode([4, 5])


# a worker that needs no processor imports torch alone
EMPTY = {"plain_text": "7"}


def test_what_fails_in_a_worker_is_said(capfd):
    encoder = PromptEncoder(Odd(), 1)
    (prompt,) = encoder([(0, row(0))])
    with pytest.raises(PromptWorkerError, match=r"(?s)worker process failed.*raise OddError.*no template"):
        prompt()
    (prompt,) = encoder([(0, row(1, extra=NotThere()))])
    with pytest.raises(PromptWorkerError, match="row 1, got the end of its worker.* with exit code 1; see its trace"):
        prompt()
    assert "/nonexistent/file" in capfd.readouterr().err
    encoder.close()


def test_workers_start_anew_after_close_and_with_the_signals_of_a_run_blocked():
    encoder = PromptEncoder(None, 1)
    for text in ("7", "8"):
        (prompt,) = encoder([(0, {"plain_text": text})])
        assert prompt().row == {"plain_text": text}
        status = Path(f"/proc/{encoder.workers[0].process.pid}/status").read_text()
        blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
        assert all(blocked >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM))
        encoder.close()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_workers_end_with_their_encoder():
    encoder = PromptEncoder(None, 1)
    assert not encoder.workers  # they are started when they are needed
    next(encoder([(0, EMPTY)]))()
    process = encoder.workers[0].process
    assert process.is_alive()
    del encoder
    assert not process.is_alive()


PARENTS = """
import os, time
from rlkit.vlm.prompt_workers import PromptEncoder

if __name__ == "__main__":
    os.fork()
    encoder = PromptEncoder(None, 1)
    [prompt() for prompt in encoder([(0, {"plain_text": "7"})])]
    os.write(1, f"{os.getpid()} {encoder.workers[0].process.pid}\\n".encode())
    time.sleep(100)
"""


def test_workers_end_with_their_process(tmp_path):
    """Also if it is killed, and cannot end them. Of two processes, forked after the imports, one is killed."""
    (tmp_path / "parents.py").write_text(PARENTS)
    command = [sys.executable, tmp_path / "parents.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as first:
        worker_of = dict(map(int, first.stdout.readline().split()) for _ in range(2))
        assert all(map(is_running, worker_of.values()))
        for parent, worker in worker_of.items():
            os.kill(parent, signal.SIGKILL if parent == first.pid else signal.SIGINT)
            until(lambda both=(parent, worker): not any(map(is_running, both)))
