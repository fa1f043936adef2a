import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from torch.optim import SGD

from rlkit.data import append_response, collate, prompt_sample
from rlkit.rewards import judge, score
from rlkit.rewards.judge import chat_judge, last_score, model_scores

ROW = {"question": "2 + 2?", "answer": "4", "where": "row 7"}


class Server:
    """A stand-in for a chat server on the loopback: `plan` gives (status, reply text) for each request in turn.

    It replies to so many requests `at_once`: when all of them have arrived.
    """

    def __init__(self, plan, at_once=1):
        self.plan, self.seen, self.now, self.most = plan, [], 0, 0
        lock, server, all_here = threading.Lock(), self, threading.Barrier(at_once)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    server.seen.append({**body, "path": self.path, "key": self.headers["Authorization"]})
                    server.now += 1
                    server.most = max(server.most, server.now)
                    status, text = server.plan(len(server.seen) - 1, body)
                all_here.wait(100)
                time.sleep(0.02)
                with lock:
                    server.now -= 1
                choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
                whole = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
                sent = (text if status == 299 else json.dumps(whole)).encode()
                self.send_response(200 if status == 299 else status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(sent)))
                self.send_header("retry-after-ms", "1")
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_it_asks_and_reads_the_score(monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame")
    with Server(lambda i, body: (200, "It is right.\n**Score:** 7")) as server:
        reward = chat_judge(server.url, "a/model", max_tokens=99, api_key_variable="MY_KEY")
        assert reward("It is {4}.", ROW) == 0.7
    (seen,) = server.seen
    assert seen["path"] == "/v1/chat/completions" and seen["model"] == "a/model" and seen["key"] == "Bearer sesame"
    assert seen["temperature"] == 0 and seen["max_tokens"] == 99
    content = seen["messages"][0]["content"]
    assert all(part in content for part in ("2 + 2?", "It is {4}.", "Reference answer:\n4"))


def test_a_prompt_and_a_parser_of_ones_own():
    with Server(lambda i, body: (200, body["messages"][0]["content"])) as server:
        reward = chat_judge(server.url, "m", lambda text, row: f"{row['answer']}|{text}", parse=lambda s: float(len(s)))
        assert reward("abc", ROW) == 5.0


def test_it_tries_again():
    with Server(lambda i, body: (200, "Score: 10") if i == 3 else (500 if i else 429, "")) as server:
        assert chat_judge(server.url, "m", retries=3)("x", ROW) == 1.0
        assert len(server.seen) == 4


@pytest.mark.parametrize(
    ("status", "text"),
    [(500, ""), (429, ""), (400, ""), (404, ""), (200, "no score"), (200, ""), (200, None), (200, "Score: 11"),
     (299, "{}"), (299, '{"choices": []}'), (299, "not json"), (299, "[]"), (299, '{"choices": [{}]}')],
)  # fmt: skip
def test_failure_is_not_zero(status, text, caplog, tmp_path):
    with Server(lambda i, body: (status, text)) as server:
        reward = chat_judge(server.url, "m", retries=1, cache=tmp_path)
        assert reward("x", ROW) is None
        assert len(server.seen) == (2 if status in (429, 500) else 1)
    assert "judge m on row 7: " in caplog.text and not list(tmp_path.rglob("*.json"))


def test_no_server_and_a_slow_one(caplog):
    with Server(lambda i, body: (200, "Score: 1")) as server:
        slow = chat_judge(server.url, "m", retries=0, seconds=0.001)
        assert slow("x", ROW) is None and "APITimeoutError" in caplog.text
    gone = chat_judge(server.url, "m", retries=0)
    assert gone("x", ROW) is None and "APIConnectionError" in caplog.text
    rewards = score(gone, [prompt_sample([1], row=ROW)])
    assert rewards.isnan().all()


def test_the_cache_knows_the_whole_request(tmp_path):
    with Server(lambda i, body: (200, f"Score: {i}")) as server:
        reward = chat_judge(server.url, "m", cache=tmp_path)
        assert [reward("x", ROW), reward("x", ROW), reward("y", ROW)] == [0.0, 0.0, 0.1]
        assert reward("x", {**ROW, "where": "elsewhere"}) == 0.0  # not in the prompt
        assert reward("x", {**ROW, "answer": "5"}) == 0.2
        assert chat_judge(server.url, "m", cache=tmp_path)("x", ROW) == 0.0  # another process, another day
        assert chat_judge(server.url, "other", cache=tmp_path)("x", ROW) == 0.3
        assert chat_judge(server.url, "m", cache=tmp_path, max_tokens=5)("x", ROW) == 0.4
        assert chat_judge(server.url, "m")("x", ROW) == 0.5
        assert chat_judge(server.url, "m", cache=tmp_path, parse=lambda reply: -1.0)("x", ROW) == -1.0
        assert len(server.seen) == 6
        files = sorted(tmp_path.rglob("*.json"))
        assert len(files) == 5 and all("sesame" not in file.read_text() for file in files)
        for file in files:
            file.write_text('{"reply": "Sco')  # cut short
        assert reward("x", ROW) == 0.6 and reward("x", ROW) == 0.6
        assert not list(tmp_path.rglob("*.part"))


def test_requests_at_once_are_bounded():
    with Server(lambda i, body: (200, "Score: 5"), at_once=3) as server:
        reward = chat_judge(server.url, "m", parallel=3)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda i: reward(str(i), ROW), range(24))) == [0.5] * 24
        assert server.most == 3
    with pytest.raises(ValueError, match="parallel: expected at least 1, got 0"):
        chat_judge("http://127.0.0.1:1/v1", "m", parallel=0)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Score: 7", 0.7), ("score:10", 1.0), ("Score: 0", 0.0), ("Score: 3\nno:\nScore: 4.5", 0.45),
        ("**Score: 8**", 0.8), ("**Score**: 8", 0.8), ("Score: 7/10", 0.7), ("Score: -1", None), ("Score: 11", None),
        ("Score: ten", None), ("7", None), ("", None), ("underscore: 3", None),
    ],
)  # fmt: skip
def test_last_score(reply, expected):
    assert last_score(reply) == expected


def test_last_score_of_another_scale():
    assert last_score("Score: 3", highest=5) == 0.6 and last_score("Score: 6", highest=5) is None


def test_a_reward_model_scores_whole_rows(tiny_dir):
    """Through an engine: the head behind the last token of each row, as the bare model has it."""
    from rlkit.engines import make_engine
    from rlkit.engines.distributed import init_distributed
    from rlkit.engines.value_head import scoring_batch, with_value_head
    from rlkit.vlm import load_model

    init_distributed()
    model = with_value_head(load_model(tiny_dir))
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head.normal_(generator=torch.Generator().manual_seed(0))
    samples = [
        append_response(prompt_sample([20, 21]), tokens, [0.0] * len(tokens))
        for tokens in ([22], [22, 23, 24, 25], [26, 27])
    ]
    model.eval()
    with torch.no_grad():
        wanted = [model(input_ids=torch.tensor([sample.token_ids])).logits[0, -1, 0].item() for sample in samples]
    engine = make_engine("fsdp2", "value_model", model=model, optimizer=lambda params: SGD(params, lr=0.0))
    found = model_scores(lambda batch: engine.infer_batch(scoring_batch(batch), ("values",))["values"].sum(1), samples)
    torch.testing.assert_close(found, torch.tensor(wanted), atol=1e-5, rtol=1e-4)
    assert len(set(found.tolist())) == 3


def test_a_score_that_is_no_number_is_not_judged():
    samples = [prompt_sample([1, 2]), prompt_sample([3]), prompt_sample([4])]
    found = model_scores(lambda batch: torch.tensor([1.5, math.inf, math.nan], dtype=torch.float64), samples)
    assert found[0] == 1.5 and found[1:].isnan().all() and found.dtype == torch.float32
    with pytest.raises(ValueError, match=r"infer: expected \[3\] scores, got \[3, 2\]"):
        model_scores(lambda batch: collate(samples).tokens, samples)
    assert judge.model_scores(lambda batch: torch.zeros(len(batch)), []).shape == (0,)
