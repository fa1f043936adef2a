"""LongRoPE: a run has one set of factors, in rows of any length, in the trainer and in every sampling back end."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlkit.data import append_response, collate, prompt_sample
from rlkit.engines import make_engine
from rlkit.engines.distributed import init_distributed
from rlkit.engines.packing.attention import use_packed_attention
from rlkit.mismatch.__main__ import main as mismatch
from rlkit.plan.workload import longest_batch
from rlkit.replay.bundles import Bundle, Draw, write_bundle
from rlkit.rollout import Sampling, make_rollout
from rlkit.runs import context_length, parse_options, teachers
from rlkit.runs.models import build_scorer, check_rope_factors, shared_options
from rlkit.vlm import encode_prompt, tiny_text_tokenizer
from rlkit.vlm.long_rope import fix_rope_factors

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from family_configs import BASE
from helpers import load
from test_families import LEFT, WAYS, all_at_once, left_padded, one_at_a_time, text_model

ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 5.0],
    "original_max_position_embeddings": 32,
}  # fmt: skip
PROMPT = 8


def phi3(rope=ROPE, **options):
    return text_model("phi3", {"original_max_position_embeddings": 32, "rope_parameters": dict(rope), **options})


def transformers_own(factors):
    """One whose two sets of factors are the same, so that lengths do not matter."""
    return phi3({**ROPE, "short_factor": ROPE[factors], "long_factor": ROPE[factors]})


def rows_of(lengths):
    """Responses to one prompt."""
    g = torch.Generator().manual_seed(0)
    start = prompt_sample(torch.randint(3, 80, (PROMPT,), generator=g).tolist())
    responses = [torch.randint(3, 80, (n - PROMPT,), generator=g).tolist() for n in lengths]
    return collate([append_response(start, response, [-1.0] * len(response)) for response in responses])


@pytest.mark.parametrize(
    ("longest", "factors", "lengths"),
    [
        (None, "short_factor", [20, 32]),
        (32, "short_factor", [32, 33]),
        (33, "long_factor", [10, 20]),
        (33, "long_factor", [20, 40]),
    ],
)
@pytest.mark.parametrize("way", [*WAYS, LEFT])
def test_rows_of_all_lengths_have_the_factors_of_the_run(way, longest, factors, lengths):
    model, rows = phi3(), rows_of(lengths)
    weights = torch.ones(rows.tokens.shape)
    use_packed_attention(model, longest_sequence=longest)
    found = left_padded(model, rows, weights) if way == LEFT else all_at_once(model, rows, weights, WAYS[way])
    expected = one_at_a_time(transformers_own(factors), rows, weights)
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_are_too_long_for_short_factors_are_refused(way):
    model, rows = phi3(), rows_of([20, 34])
    use_packed_attention(model, longest_sequence=32)
    expected = "^lengths: expected at most 32 tokens in a sequence of phi3 with LongRoPE's short .*, got 34; .* say how"
    with pytest.raises(ValueError, match=expected):
        all_at_once(model, rows, torch.ones(rows.tokens.shape), WAYS[way])


def test_a_row_one_longer_keeps_the_scale_of_phimoe():
    """Its last token is read by nothing, but transformers would scale the queries and keys of all by `long_mscale`."""
    rope = {**ROPE, "short_mscale": 1.2, "long_mscale": 3.0}
    model, rows = text_model("phimoe", {"rope_parameters": rope, "num_local_experts": 4}), rows_of([20, 33])
    same = text_model("phimoe", {"rope_parameters": {**rope, "long_mscale": 1.2}, "num_local_experts": 4})
    weights = torch.ones(rows.tokens.shape)
    use_packed_attention(model)
    found, expected = all_at_once(model, rows, weights, WAYS["packed"]), one_at_a_time(same, rows, weights)
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    assert model.config.rope_parameters["long_mscale"] == 3.0


@pytest.mark.parametrize("longest", [32, 60])
def test_the_sampler_hf_has_the_factors_of_its_trainer(longest):
    """Some rows end before the length up to which transformers has short factors, others after it."""
    tokenizer = tiny_text_tokenizer(["how many cats are there? three"])
    engine = make_engine("fsdp2", model=phi3(vocab_size=len(tokenizer)), longest_sequence=longest, device="cpu")
    rollout = make_rollout("hf", engine.gathered, processor=tokenizer)
    prompts = [encode_prompt(tokenizer, {"question": "how many cats" + " cats" * i}, group_id=i) for i in range(4)]
    new = longest - max(len(prompt.token_ids) for prompt in prompts)
    batch = collate(rollout.generate(prompts, [Sampling(2), *[Sampling(new)] * 3], n=2))
    assert min(batch.lengths) < 32 and max(batch.lengths) == longest
    found, expected = batch.rollout_logprobs[batch.mask], engine.infer_batch(batch)["logprobs"][batch.mask]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_model_whose_factors_cannot_be_fixed_is_refused():
    rope = {**ROPE, "short_mscale": 1.0, "long_mscale": 1.0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("phimoe", **BASE, rope_parameters=rope))
    fix_rope_factors(model, 32)
    with pytest.raises(ValueError, match="^longest_sequence: expected at most 32 for phimoe, .*, got 33"):
        fix_rope_factors(model, 33)
    model.model.rotary_emb.rope_type = {"full_attention": "longrope"}
    with pytest.raises(ValueError, match="^model: expected one kind of LongRoPE in all layers, got phimoe"):
        fix_rope_factors(model, 32)


@pytest.mark.parametrize(
    ("recipe", "options", "longest", "context"),
    [
        ("grpo_vlm", "--max_prompt_tokens 20 --max_new_tokens 12", 32, 32),
        ("grpo_vlm", "--max_prompt_tokens 21 --max_new_tokens 12", 33, 128),
        ("grpo_vlm", "--max_new_tokens 12", None, 32),
        ("evaluate", "--max_prompt_tokens 21 --max_new_tokens 12", 33, 128),
        ("sft", "--max_tokens 40", 40, 128),
        ("reward_model", "", None, 32),
    ],
)
def test_options_of_recipes_say_how_long_sequences_become(recipe, options, longest, context):
    cfg, config = parse_options(load(recipe).Config, "", options.split()), phi3().config
    assert shared_options(cfg, None, config).get("longest_sequence") == longest
    others = [(cfg, text_model("llama", {}).config), (replace(cfg, engine="megatron"), config)]
    assert not any("longest_sequence" in shared_options(options, None, model) for options, model in others)
    engine = SimpleNamespace(config=config, longest_sequence=longest)
    assert context_length(engine, SimpleNamespace()) == context
    if recipe != "evaluate":
        workload = longest_batch(cfg, config, 1, None)
        assert workload.prompt + workload.response == (longest or 32)


@pytest.mark.parametrize(
    ("rollout", "longest", "sampled", "error"),
    [
        ("vllm", None, 32, None),
        ("vllm", 40, 40, None),
        ("hf", 40, None, None),
        ("sglang", None, 128, None),  # it is sent short sequences only
        (
            "vllm",
            32,
            40,
            "^max_model_len: expected at most 32 in the sampler, got 40: phi3 uses long .* and short ones in",
        ),
        ("vllm_server", 40, [40, 128], None),
        ("vllm_server", None, [32, 128], "^max_model_len: expected at most 32 in the sampler, got 128: phi3 uses long"),
        ("vllm_server", 40, [128, 32], "^max_model_len: expected more than 32 in the sampler, got 32: phi3 .* short"),
        ("vllm", None, 40, "^max_model_len: expected at most 32 .* up to an unknown number of tokens"),
        ("sglang", 40, 128, "^rollout: expected vllm, vllm_server or hf .* 40 tokens of phi3, got sglang"),
    ],
)
def test_a_sampler_with_other_factors_is_refused(rollout, longest, sampled, error):
    cfg, engine = SimpleNamespace(rollout=rollout), SimpleNamespace(config=phi3().config, longest_sequence=longest)
    sampler = SimpleNamespace() if sampled is None else SimpleNamespace(max_model_len=sampled)
    if isinstance(sampled, list):
        sampler = SimpleNamespace(max_model_len=min(sampled), context_lengths=sampled)
    if error is None:
        return check_rope_factors(cfg, engine, sampler)
    with pytest.raises(ValueError, match=error):
        check_rope_factors(cfg, engine, sampler)


@pytest.mark.parametrize(
    ("longest", "contexts", "wrong"), [(40, [40, 128], None), (40, [128, 32], 32), (32, [32], None), (32, [32, 40], 40)]
)
def test_servers_of_a_teacher_with_other_factors_are_refused(tmp_path, monkeypatch, longest, contexts, wrong):
    tokenizer = tiny_text_tokenizer(["how many cats"])
    phi3(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(teachers, "VllmTeacher", lambda **options: SimpleNamespace(context_lengths=contexts))
    arguments = f"--teacher {tmp_path} --teacher_servers http://a --max_prompt_tokens {longest - 4} --max_new_tokens 4"
    cfg, run = parse_options(load("distill").Config, "", arguments.split()), SimpleNamespace(out=tmp_path)
    expected = pytest.raises(ValueError, match=f"^max_model_len: .*, got {wrong}: phi3") if wrong else nullcontext()
    with expected:
        teachers.build_teacher(cfg, run, [], tokenizer, SimpleNamespace(model_parallel_group=None))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--max_prompt_tokens 28 --max_new_tokens 4", "short LongRoPE factors, for sequences of up to 32 tokens"),
        (
            "--max_prompt_tokens 29 --max_new_tokens 4",
            "long LongRoPE factors, for sequences of up to 33 tokens (short ones: up to 32)",
        ),
    ],
)
def test_the_factors_of_a_run_are_printed_at_its_start(tmp_path, capsys, options, said):
    tokenizer = tiny_text_tokenizer(["how many cats"])
    phi3(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    cfg = parse_options(load("evaluate").Config, "", options.split())
    init_distributed("cpu")
    build_scorer(cfg, str(tmp_path), tokenizer)
    assert f"{tmp_path}: {said}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("options", "differs"), [({"max_prompt_tokens": 36, "max_new_tokens": 4}, 0), ({}, 1)])
def test_the_mismatch_of_a_bundle_is_measured_with_the_factors_of_its_run(tmp_path, options, differs):
    tokenizer = tiny_text_tokenizer(["how many cats are there? three"])
    model = phi3(vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    engine = make_engine("fsdp2", model=model, longest_sequence=40, device="cpu")
    prompt = encode_prompt(tokenizer, {"question": "how many cats"})
    samples = make_rollout("hf", engine.gathered, processor=tokenizer).generate([prompt], Sampling(4))
    write_bundle(tmp_path / "step_0", Bundle(0, options=options, draws=[Draw(samples)]))
    with pytest.raises(SystemExit) as end:
        mismatch([str(tmp_path / "model"), "--rollout", "hf", "--bundle", str(tmp_path / "step_0")])
    assert end.value.code == differs
