"""A real checkpoint through the whole stack: SmolLM2-135M-Instruct, out of its package.

What it has that the tiny models lack: a system line in its chat template, a padding token that is its end token, tied
embeddings in bfloat16 files, 30 layers, and text that it knows how to continue.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlkit.data import collate, load_task, prompt_sample
from rlkit.engines import make_engine
from rlkit.losses import clipped_policy_loss, token_mean
from rlkit.rollout import Sampling, make_rollout
from rlkit.vlm import encode_prompt, load_model, load_processor, lora, model_path, render

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
CAPITAL = {"question": "What is the capital of France?", "images": [], "answer": "Paris"}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """Its directory, converted once for this module."""
    model_path.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RLKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield model_path("smollm2")
    model_path.cache_clear()


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return load_processor(smollm2)


@pytest.fixture(scope="module")
def engine(smollm2, tokenizer):
    return make_engine("fsdp2", model=load_model(smollm2), processor=tokenizer)


@pytest.fixture(scope="module")
def rollout(engine, tokenizer):
    return make_rollout("hf", engine.gathered, processor=tokenizer)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    rows = [load_task("addition").heldout[0], {**CAPITAL, "question": f"{CAPITAL['question']} Response in one word."}]
    return [encode_prompt(tokenizer, row, group_id=i) for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def responses(rollout, prompts):
    """Two responses to each of two questions, of different lengths."""
    return rollout.generate(prompts, Sampling(6, seed=(3,)), n=2)


def test_it_responses_and_ends(rollout, tokenizer):
    (response,) = rollout.generate([encode_prompt(tokenizer, CAPITAL)], Sampling(12, temperature=0.0))
    assert response.text == "The capital of France is Paris." and response.finish_reason == "stop"
    assert response.token_ids[-1] == tokenizer.eos_token_id == tokenizer.pad_token_id  # the end is trained on
    assert response.mask[-1]


def test_the_system_line_of_the_template_is_there_once(tokenizer):
    question = [{"role": "user", "content": "Hi"}]
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(tokenizer, question, add_generation_prompt=True) == SYSTEM + prompt
    own = render(tokenizer, [{"role": "system", "content": "Be brief."}, *question], add_generation_prompt=True)
    assert own == "<|im_start|>system\nBe brief.<|im_end|>\n" + prompt


def test_text_is_split_as_the_model_was_trained(tokenizer):
    """Digits are split first, so that spaces before one stay together: the ids of the published tokenizer."""
    for text, ids in {
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "  multiple   spaces": [216, 2701, 256, 5600],
        "Steps:\n\n1.": [*tokenizer.convert_tokens_to_ids(["Steps", ":", "ĊĊ"]), 33, 30],
    }.items():
        assert tokenizer(text)["input_ids"] == ids


def test_logprobs_equal_transformers_and_the_samplers(smollm2, engine, responses):
    """Rows one by one without padding through transformers, against packed rows with shared prompts."""
    batch = collate(responses)
    ours = engine.infer_batch(batch)["logprobs"]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    with torch.no_grad():
        for sample, row, mask in zip(responses, ours, batch.mask, strict=True):
            ids = torch.tensor([sample.token_ids])
            logprobs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            own = mask[1 : ids.shape[1]]
            torch.testing.assert_close(row[1 : ids.shape[1]][own], logprobs[own], atol=5e-5, rtol=1e-4)
            assert own.sum() == len(sample.response_ids) > 0
    gap = (ours - batch.rollout_logprobs)[batch.mask].abs()
    assert gap.mean() < 1e-5 and gap.max() < 2e-5


def test_packed_rows_and_shared_prompts_equal_padded_ones(smollm2, tokenizer, responses):
    """Log-probabilities, entropies and the gradient of adapters; the padding is the end token."""
    batch = collate(responses, advantages=torch.tensor([1.0, -0.5, 0.7, -1.0]))

    def loss_fn(out, mb):
        loss = clipped_policy_loss(out.logprobs, out.logprobs.detach(), mb.advantages, mb.mask)
        return token_mean(loss - 0.01 * out.entropy, mb.mask, mb.total_tokens), {}

    found = {}
    ways = {"shared": {}, "packed": {"share_prompts": False}, "padded": {"use_remove_padding": False}}
    for name, options in ways.items():
        torch.manual_seed(0)
        model = lora(load_model(smollm2), 4, 8)
        one = make_engine(
            "fsdp2", model=model, optimizer=lambda p: torch.optim.SGD(p, lr=0.0), keep_gradients=True, **options
        )
        metrics = one.train_batch(batch, loss_fn, outputs=("logprobs", "entropy"))
        gradient = torch.cat([p.grad.flatten() for p in one.module.parameters() if p.grad is not None])
        found[name] = one.infer_batch(batch)["logprobs"][batch.mask], gradient, torch.tensor(metrics["loss"])
    assert found["padded"][1].norm() > 1e-2
    for name in ("shared", "packed"):
        for one, expected in zip(found[name], found["padded"], strict=True):
            torch.testing.assert_close(one, expected, atol=5e-5, rtol=1e-3)


def test_in_bfloat16_the_samplers_logprobs_are_close(smollm2, tokenizer, prompts):
    """Rounding of the same weights; another response's log-probabilities would be 1 away and more."""
    engine = make_engine("fsdp2", model=load_model(smollm2), compute_dtype=torch.bfloat16)
    rollout = make_rollout("hf", engine.gathered, processor=tokenizer)
    batch = collate(rollout.generate(prompts, Sampling(6, seed=(3,)), n=2))
    gap = (engine.infer_batch(batch)["logprobs"] - batch.rollout_logprobs)[batch.mask].abs()
    assert 1e-5 < gap.mean() < 0.05 and gap.max() < 0.25


def test_adapters_merged_equal_adapters_beside_and_the_export_reads_back(smollm2, tokenizer, responses, tmp_path):
    """After a step; the head of the export is its tied embedding."""
    batch = collate(responses, advantages=torch.tensor([1.0, -0.5, 0.7, -1.0]))

    def loss_fn(out, mb):
        return token_mean(-mb.advantages[:, None] * out.logprobs, mb.mask, mb.total_tokens), {}

    model = lora(load_model(smollm2), 4, 8)
    engine = make_engine(
        "fsdp2", model=model, processor=tokenizer, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-4)
    )
    before = engine.infer_batch(batch)["logprobs"]
    engine.train_batch(batch, loss_fn)
    beside = engine.infer_batch(batch)["logprobs"]
    moved = (beside - before)[batch.mask].abs().mean()
    assert moved > 0.05
    weights = dict(engine.get_per_tensor_param())
    merged = load_model(smollm2)
    missing, unexpected = merged.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}  # tied
    found = make_engine("fsdp2", model=merged).infer_batch(batch)["logprobs"]
    torch.testing.assert_close(found[batch.mask], beside[batch.mask], atol=1e-4, rtol=1e-4)
    with engine.disable_adapter():
        reference = engine.infer_batch(batch)["logprobs"]
    torch.testing.assert_close(reference[batch.mask], before[batch.mask], atol=1e-5, rtol=1e-5)

    engine.export_hf(tmp_path, torch.bfloat16)  # as its files are
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert read.dtype == torch.bfloat16 and read.lm_head.weight is read.model.embed_tokens.weight
    name = "model.layers.29.mlp.down_proj.weight"
    assert torch.equal(read.get_parameter(name), weights[name].bfloat16())
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template
    assert read.generation_config.eos_token_id == tokenizer.eos_token_id


def test_rows_of_padding_alone_are_no_end_of_a_response(engine, tokenizer):
    """pad == eos: a shorter row's padding must not count as its end, nor an end in the prompt as the response's."""
    long, short = encode_prompt(tokenizer, CAPITAL), prompt_sample(tokenizer("Paris is")["input_ids"], group_id=1)
    assert long.token_ids.count(tokenizer.eos_token_id) == 2
    rollout = make_rollout("hf", engine.gathered, processor=tokenizer)
    batched = rollout.generate([long, short], Sampling(4, temperature=0.0))
    alone = [rollout.generate([one], Sampling(4, temperature=0.0))[0] for one in (long, short)]
    assert [one.response_ids for one in batched] == [one.response_ids for one in alone]
    assert batched[1].finish_reason == "length" and len(batched[1].response_ids) == 4


def test_host_memory_of_two_ranks_is_that_of_one_model(smollm2, tmp_path):
    """Loading takes the shards of both and a little more; rank 0 exports a file at a time, the other a few tensors."""
    script = str(Path(__file__).with_name("on_host_memory_ranks.py"))
    with socket.socket() as free, socket.socket() as also_free:
        free.bind(("localhost", 0))
        also_free.bind(("localhost", 0))
        ports = [str(one.getsockname()[1]) for one in (free, also_free)]
    done = subprocess.run([sys.executable, script, smollm2, str(tmp_path), *ports], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (
        json.loads((tmp_path / f"{rank}.json").read_text()) | json.loads((tmp_path / f"fsdp1.{rank}.json").read_text())
        for rank in (0, 1)
    )
    assert first["dtypes"] == ["torch.float32", "torch.bfloat16"]
    whole, largest = 4 * 134_515_008, 2 * 49_152 * 576  # float32 weights; embeddings in the export's bfloat16
    peaks = {name: [first[name][0], second[name][0]] for name in ("reference", "policy", "export")}
    # Lower bounds only show that something was measured: memory that a rank freed earlier and uses again is not
    # counted. Seen for Megatron: 0.84 to 1.01; for tensor parallelism once 0.41.
    assert 0.5 * whole < sum(peaks["policy"]) < 1.1 * whole
    assert sum(peaks["reference"]) < whole  # bfloat16, and the modules that are imported for it
    assert 0.25 * whole < peaks["export"][0] < 0.6 * whole
    assert peaks["export"][1] < 3.5 * largest  # seen: 2 to 3.2 times, more on a busy machine; the whole would be 4.8
    assert sum(peaks["export"]) < whole
    names = ["tensor", "fsdp1", "megatron_tensor", "megatron_stages"]
    held = {name: 4 * sum(rank[f"{name}_parameters"] for rank in (first, second)) for name in names}
    taken = {name: first[name][0] + second[name][0] for name in names}
    print({name: round(taken[name] / held[name], 2) for name in names})
    assert 185e6 < held["tensor"] < 195e6  # both ranks have all of the embeddings and of the output layer
    assert 150e6 < held["megatron_tensor"] < 170e6  # the ranks share it, but for its norms
    assert held["megatron_stages"] == whole + 4 * 49_152 * 576  # the last stage has a copy of the embeddings
    for name in ("tensor", "megatron_tensor", "megatron_stages"):
        assert 0.25 * held[name] < taken[name] < 1.1 * held[name], name
    assert held["fsdp1"] == whole < taken["fsdp1"] < 1.1 * whole
    export, sync = ([rank[f"fsdp1_{name}"][0] for rank in (first, second)] for name in ("export", "sync"))
    print(f"fsdp1: export {sum(export) / whole:.2f}, weight sync {sum(sync) / whole:.2f}")
    assert 0.25 * whole < export[0] < 0.8 * whole  # seen: 0.52 to 0.6
    assert export[1] < 3.5 * largest and sum(export) < whole
    assert all(0.5 * largest < peak < 3.5 * largest for peak in sync)
