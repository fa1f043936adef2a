"""Sampling from the trainer's own model."""

import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rlkit.data import collate, load_task, step_rows
from rlkit.engines import make_engine
from rlkit.losses import mismatch_stats
from rlkit.rewards import exact_match, without_thinking
from rlkit.rollout import Sampling, make_rollout, uniforms
from rlkit.rollout.hf import cache_bytes_per_token
from rlkit.rollout.inference_requests import finished_sample
from rlkit.rollout.sampling import sample_tokens
from rlkit.vlm import (
    encode_prompt,
    encode_prompts,
    load_model,
    load_processor,
    suppressed_token_ids,
    tiny_text_tokenizer,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from family_configs import BASE, TEXT
from rows import make_samples


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


@pytest.fixture(scope="module")
def engine(tiny_dir, processor):
    suppressed = suppressed_token_ids(load_model(tiny_dir).config, processor.tokenizer)
    return make_engine("fsdp2", model=load_model(tiny_dir), suppressed_token_ids=suppressed, temperature=0.8)


@pytest.fixture(scope="module")
def rollout(engine, processor):
    return make_rollout("hf", engine.gathered, processor=processor)


@pytest.fixture(scope="module")
def prompts(processor):
    """Images of three sizes, and a prompt without one."""
    sizes = ((56, 56), None, (84, 56), (56, 112))
    samples = make_samples(processor, responses=(1, 1, 1, 1), sizes=sizes)
    rows = [(s.group_id, s.row) for s in samples]
    return encode_prompts(processor, rows)[0]


def test_logprobs_equal_the_trainers(engine, rollout, prompts):
    """As one forward pass over complete sequences gives them; prompts differ in length and rows end early."""
    samples = rollout.generate(prompts, Sampling(12, temperature=0.8, seed=(3,)), n=6)
    batch = collate(samples)
    trainer = engine.infer_batch(batch)["logprobs"]
    torch.testing.assert_close(trainer[batch.mask], batch.rollout_logprobs[batch.mask], atol=1e-5, rtol=1e-5)
    assert [s.group_id for s in samples] == [g for g in range(4) for _ in range(6)]
    assert len({len(s.response_ids) for s in samples}) > 1


def test_a_batch_of_prompts_multiplies_one_matrix_with_the_head(engine, rollout, prompts):
    """torch multiplies each row of a slice with its own copy of the head, 11 GB for 200 prompts to SmolLM2."""
    seen = []
    head = engine.module.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append((inputs[0].shape, inputs[0].is_contiguous())))
    rollout.generate(prompts, Sampling(2))
    handle.remove()
    assert [shape[:2] for shape, _ in seen] == [(4, 1), (4, 1)] and all(contiguous for _, contiguous in seen)


def test_special_tokens_around_thinking_stay_in_the_text():
    """In all rollouts: hf has a path of its own, the others make their samples by `finished_sample`."""
    tokenizer = tiny_text_tokenizer(["hm 5 4"])
    tokenizer.add_tokens(["[THINK]", "[/THINK]", "[IMG]"], special_tokens=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**BASE, "vocab_size": len(tokenizer)}))
    ids = tokenizer("[THINK]hm[IMG] 5[/THINK]4<|im_end|>", add_special_tokens=False)["input_ids"]
    script = iter(ids * 2)
    model.lm_head.register_forward_hook(
        lambda layer, args, logits: 1e4 * torch.eye(len(tokenizer))[next(script)].expand_as(logits)
    )
    rollout = make_rollout("hf", lambda: nullcontext(model), processor=tokenizer)
    row, reward = {"question": "hm", "answer": "4"}, without_thinking(exact_match)
    for more, expected in (({"thinking_tags": ["[THINK]", "[/THINK]"]}, "[THINK]hm 5[/THINK]4"), ({}, "hm 54")):
        request = encode_prompt(tokenizer, {**row, **more})
        (sampled,) = rollout.generate([request], Sampling(20))
        assert sampled.response_ids == ids
        finished = finished_sample(request, ids, [0.0] * len(ids), "stop", processor=tokenizer, version=0)
        assert sampled.text == finished.text == expected and reward(sampled.text, sampled.row) == float("[" in expected)


def test_rows_that_end_do_not_change_the_others(engine, rollout, prompts, processor):
    """An end token made likely: rows drop out of the cache when half have ended, those that stay keep their place, so
    that no more than twice as many are computed as still write. A group is handed over after its last token, once."""
    end, computed, finished = processor.tokenizer.eos_token_id, [], []

    def push(module, args, logits):
        computed.append(len(logits))
        return logits + 3.0 * torch.nn.functional.one_hot(torch.tensor(end), logits.shape[-1])

    with engine.gathered() as module:
        hook = module.get_output_embeddings().register_forward_hook(push)
    try:
        sampling = Sampling(24, temperature=0.8, seed=(4,))
        tell = lambda i, group: finished.append((i, group, len(computed)))  # noqa: E731
        samples = rollout.generate(prompts, sampling, n=8, on_finished=tell)
        rows, batch = computed[1:], collate(samples)  # of each step behind the prompts
        again = rollout.generate(prompts, sampling, n=8)
        assert [(s.response_ids, s.logprobs) for s in samples] == [(s.response_ids, s.logprobs) for s in again]
        trainer = engine.infer_batch(batch)["logprobs"]
    finally:
        hook.remove()
    lengths = Counter(len(s.response_ids) for s in samples)
    assert len(lengths) > 4 and lengths[1] and len(rows) == max(lengths) - 1
    assert sorted(i for i, _, _ in finished) == [0, 1, 2, 3] and len({when for _, _, when in finished}) > 1
    for i, group, when in finished:
        assert group == samples[8 * i : 8 * i + 8] and when == max(len(s.response_ids) for s in group)
    assert all(count <= 2 * sum(len(s.response_ids) > step for s in samples) for step, count in enumerate(rows, 1))
    torch.testing.assert_close(trainer[batch.mask], batch.rollout_logprobs[batch.mask], atol=1e-5, rtol=1e-5)


def test_ranks_that_sample_together_decode_as_many_sequences_as_fit_on_each(engine, processor, prompts, monkeypatch):
    """16 fit on this rank and 8 on the other."""
    group = dist.new_group([0])
    shared = make_rollout("hf", engine.gathered, processor=processor, model_parallel_group=group).rollout
    monkeypatch.setattr(shared, "_sequences_in_memory", lambda module, tokens: 16)
    batches, generate = [], shared._generate_batch
    monkeypatch.setattr(shared, "_generate_batch", lambda *a: batches.append(len(a[1])) or generate(*a))

    def smallest(most, op, group):
        assert op == dist.ReduceOp.MIN and group is shared.model_parallel_group
        most.clamp_(max=8)

    monkeypatch.setattr(dist, "all_reduce", smallest)
    assert len(shared.generate(prompts, Sampling(2), n=4)) == 16
    assert batches == [2, 2]


def test_what_is_sampled_does_not_depend_on_the_batch(engine, rollout, prompts, processor):
    sampling = Sampling(8, seed=(1, 2))
    batched = [s.response_ids for s in rollout.generate(prompts, sampling, n=3)]
    alone = [s.response_ids for p in prompts for s in rollout.generate([p], sampling, n=3)]
    small = make_rollout("hf", engine.gathered, processor=processor, max_sequences=3)
    assert batched == alone == [s.response_ids for s in small.generate(prompts, sampling, n=3)]
    assert batched != [s.response_ids for s in rollout.generate(prompts, Sampling(8, seed=(1, 3)), n=3)]
    backwards = rollout.generate(prompts[::-1], sampling, n=3)
    assert batched[:3] == [s.response_ids for s in backwards[-3:]]
    assert len({tuple(ids) for ids in batched}) > 8  # the responses to one prompt differ


def test_greedy_equals_generate_of_transformers(tiny_dir, rollout, prompts, processor):
    model = load_model(tiny_dir)
    suppressed = suppressed_token_ids(model.config, processor.tokenizer).tolist()
    for prompt, sample in zip(prompts, rollout.generate(prompts, Sampling(10, temperature=0.0)), strict=True):
        ids = torch.tensor([prompt.token_ids])
        kinds = (ids == model.config.image_token_id).int()
        model.model.rope_deltas = None
        expected = model.generate(
            input_ids=ids,
            mm_token_type_ids=kinds,
            **prompt.vision,
            generation_config=GenerationConfig(
                max_new_tokens=10,
                do_sample=False,
                suppress_tokens=suppressed,
                eos_token_id=processor.tokenizer.eos_token_id,
            ),
        )
        assert sample.response_ids == expected[0, ids.shape[1] :].tolist()


def test_sampled_image_token_is_impossible(engine, rollout, prompts, processor):
    """Even if the model prefers it to all others; the trainer scores the same distribution."""
    config = engine.config
    wanted = [config.image_token_id, config.video_token_id, config.vision_start_token_id]

    def push(module, args, logits):
        logits = logits.clone()
        logits[..., wanted] += 100.0
        return logits

    with engine.gathered() as module:
        head = module.get_output_embeddings()
    hook = head.register_forward_hook(push)
    try:
        samples = rollout.generate(prompts, Sampling(8, temperature=0.8), n=4)
        batch = collate(samples)
        trainer = engine.infer_batch(batch)["logprobs"]
    finally:
        hook.remove()
    assert not {t for s in samples for t in s.response_ids} & set(wanted)
    torch.testing.assert_close(trainer[batch.mask], batch.rollout_logprobs[batch.mask], atol=1e-5, rtol=1e-5)


def test_end_tokens_and_length(rollout, prompts, processor):
    samples = rollout.generate(prompts, Sampling(3, seed=(5,)), n=64)
    end = processor.tokenizer.eos_token_id
    reasons = Counter(s.finish_reason for s in samples)
    assert set(reasons) <= {"stop", "length"} and reasons["length"]
    for s in samples:
        assert (s.finish_reason == "stop") == (s.response_ids[-1] == end)
        assert end not in s.response_ids[:-1]
        assert len(s.response_ids) == 3 or s.finish_reason == "stop"
        assert s.text == processor.tokenizer.decode(s.response_ids, skip_special_tokens=True)


def test_each_request_has_its_own_sampling_parameters(rollout, prompts):
    """Each request in a batch has the responses that it has alone, with its length, temperature, seed and stop
    tokens."""
    (first,) = rollout.generate(prompts[:1], Sampling(6, seed=(5,)))
    how = [
        Sampling(6, seed=(5,), stop=(first.response_ids[2],)), Sampling(3, temperature=0.0), Sampling(9, 1.7, (2,)),
        *[Sampling(1, 0.3)] * (len(prompts) - 3),
    ]  # fmt: skip
    batched = rollout.generate(prompts, how, n=2)
    alone = [s for request, one in zip(prompts, how, strict=True) for s in rollout.generate([request], one, n=2)]
    assert [s.response_ids for s in batched] == [s.response_ids for s in alone]
    for sample, other in zip(batched, alone, strict=True):
        assert_allclose(sample.logprobs, other.logprobs, atol=1e-5)
    end = first.response_ids.index(first.response_ids[2]) + 1
    assert batched[0].response_ids == first.response_ids[:end] and batched[0].finish_reason == "stop"
    assert max(len(s.response_ids) for s in batched) > 3
    with pytest.raises(ValueError, match="sampling: expected one, or one for each of 2 requests, got 3"):
        rollout.generate(prompts[:2], how[:3])


def test_a_sampler_with_other_weights_is_detected(tiny_dir, engine, prompts, processor):
    """With the trainer's weights the mismatch is rounding; with other weights it is large."""
    stale = load_model(tiny_dir)
    with torch.no_grad():
        for parameter in stale.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    other = make_engine("fsdp2", model=stale)
    found = []
    for source in (engine, other):
        sampler = make_rollout("hf", source.gathered, processor=processor)
        sampler.update_weights(iter(()))
        samples = sampler.generate(prompts, Sampling(8, temperature=0.8), n=4)
        assert {s.version for s in samples} == {1}
        batch = collate(samples)
        trainer = engine.infer_batch(batch)["logprobs"]
        found.append(mismatch_stats(trainer, batch.rollout_logprobs, batch.mask)["mismatch/abs_dlogp"].item())
    assert found[0] < 1e-5 and found[1] > 0.3


def test_sampling_follows_the_distribution():
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3, 0.0])
    n = 20000
    tokens = sample_tokens(probabilities.log().expand(n, 5), torch.rand(n, generator=torch.Generator().manual_seed(0)))
    share = torch.bincount(tokens, minlength=5) / n
    assert share[1] == share[4] == 0
    torch.testing.assert_close(share, probabilities, atol=0.012, rtol=0)
    edges = sample_tokens(probabilities.log().expand(3, 5), torch.tensor([0.0, 0.51, 1.0], dtype=torch.float64))
    assert edges.tolist() == [0, 2, 3]


def test_uniforms_are_keyed_by_sample():
    whole = uniforms((0, 7), [4, 9], 3, 5)
    assert whole.shape == (6, 5) and len(set(whole.flatten().tolist())) == 30
    assert torch.equal(whole[3:], uniforms((0, 7), [9], 3, 5))
    assert torch.equal(whole[:, :2], uniforms((0, 7), [4, 9], 3, 2))
    assert not torch.equal(whole, uniforms((0, 8), [4, 9], 3, 5))


def test_generation_restores_the_module(engine, rollout, prompts):
    engine.module.train()
    rollout.generate(prompts[:1], Sampling(2))
    assert engine.module.training
    assert rollout.generate([], Sampling(2), n=4) == []


def test_cache_bytes(engine):
    assert cache_bytes_per_token(engine.config, 2) == 2 * 2 * 2 * 32 * 2


@pytest.mark.parametrize(("family", "shared"), [("llama", 0), ("deepseek_v3", 0), ("gemma4_text", 2)])
def test_cache_bytes_are_those_of_transformers(family, shared):
    """Latent attention, and heads that differ between layers; layers that share their cache are counted as others."""
    config = AutoConfig.for_model(family, **{**BASE, **TEXT[family]})
    model = AutoModelForCausalLM.from_config(config)
    layers = model(torch.arange(3, 7)[None], use_cache=True).past_key_values.layers
    cached = sum(x.numel() * x.element_size() // 4 for layer in layers for x in (layer.keys, layer.values))
    counted = cache_bytes_per_token(config, 4)
    assert counted == cached if not shared else counted == 2 * cached


def test_prompts_that_are_processed_once_are_shared(processor, rollout):
    row = load_task("digits").train[0]
    samples = rollout.generate([encode_prompt(processor, row)], Sampling(2), n=5)
    assert len({id(s.vision["pixel_values"]) for s in samples}) == 1
    assert step_rows([row], 0, 2, 0)[1][1] is row


def test_bad_input_is_named(engine, processor):
    with pytest.raises(ValueError, match="max_new_tokens: expected at least 1, got 0"):
        Sampling(0)
    with pytest.raises(ValueError, match="temperature: expected at least 0, got -1"):
        Sampling(1, temperature=-1)
    with pytest.raises(ValueError, match="rollout: expected one of hf, sglang, vllm, vllm_server, got 'tgi'"):
        make_rollout("tgi", processor=None)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization: expected a share in \(0, 1\], got 80"):
        make_rollout("hf", engine.gathered, processor=processor, gpu_memory_utilization=80)
