"""FLOPs by formula, compared with torch's own counter and with numbers computed by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2_5_VLConfig

from rlkit.data import append_response, collate, load_task, prompt_sample, step_rows
from rlkit.engines import make_engine
from rlkit.engines.flops import batch_flops, count_pass, forward_flops, take_flops
from rlkit.engines.value_head import with_value_head
from rlkit.vlm import build_tiny, encode_prompts, load_model, load_processor, lora

QWEN2_5_VL_7B = Qwen2_5_VLConfig(
    text_config={
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064,
    },
    vision_config={
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
        "out_hidden_size": 3584, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
)  # fmt: skip
# layer: q and o 2 * 3584^2, k and v 2 * 3584 * 512, mlp 3 * 3584 * 18944 = 233,046,016; 28 of them
LANGUAGE = 6_525_288_448
# patches 1176 * 1280, 32 blocks of 4 * 1280^2 + 3 * 1280 * 3420: a patch; merger 5120^2 + 5120 * 3584: four patches
PATCH, MERGER = 1_505_280 + 32 * 19_686_400, 44_564_480


def test_golden_text():
    """A prompt of 100 tokens and eight responses of 20: 260 tokens, of which 160 are scored."""
    segments = [(100, 0), *[(20, 100)] * 8]
    pairs = 100 * 101 // 2 + 8 * (20 * 100 + 20 * 21 // 2)
    assert pairs == 22_730
    expected = 2 * LANGUAGE * 260 + 4 * 28 * 3584 * pairs + 2 * 3584 * 152_064 * 160
    assert expected == 3_576_673_157_120
    assert forward_flops(QWEN2_5_VL_7B, segments, scored=160) == expected
    unshared = forward_flops(QWEN2_5_VL_7B, [(120, 0)] * 8, scored=160)
    assert unshared - expected == 2 * LANGUAGE * 700 + 4 * 28 * 3584 * 7 * (100 * 101 // 2)


def test_golden_image():
    """448 x 448 pixels: 32 x 32 patches, 16 windows of 64; 28 of 32 blocks attend to a window, 4 to the image."""
    pairs = 1024 * (4 * 1024 + 28 * 64)
    tower = 2 * PATCH * 1024 + 4 * 1280 * pairs + 2 * MERGER * 256
    assert tower == 1_346_937_815_040
    assert forward_flops(QWEN2_5_VL_7B, [], image_patches=[1024]) == tower
    assert forward_flops(QWEN2_5_VL_7B, [(10, 0)], image_patches=[1024, 1024]) == 2 * tower + forward_flops(
        QWEN2_5_VL_7B, [(10, 0)]
    )


SMALL = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2", {}), ("llama", {}), ("qwen3", {"head_dim": 32}), ("gemma2", {"head_dim": 32}),
        ("qwen3_moe", {"head_dim": 32, **EXPERTS}), ("qwen2_moe", {"shared_expert_intermediate_size": 48, **EXPERTS}),
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    ],
)  # fmt: skip
def test_equals_what_torch_counts(kind, options):
    """Eager attention computes all n * n scores; the formula counts only those that the mask keeps."""
    config, n = AutoConfig.for_model(kind, **SMALL, **options), 10
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.randint(0, 300, (1, n)))
    upper = n * n - n * (n + 1) // 2
    size = getattr(config, "head_dim", None) or 16
    assert forward_flops(config, [(n, 0)], scored=n) + 4 * 3 * 4 * size * upper == counter.get_total_flops()


@pytest.fixture(scope="module")
def model_and_batch(tmp_path_factory):
    """A tiny Qwen2.5-VL, and a batch of two images with three responses each."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    task = load_task("digits")
    build_tiny(path, task.train, warm_up_steps=0)
    prompts, _ = encode_prompts(load_processor(str(path)), step_rows(task.train, 0, 2, 0))
    return str(path), collate([append_response(p, [30, 31, 32][:n], [-1.0] * n) for p in prompts for n in (1, 2, 3)])


@pytest.mark.parametrize("share", [True, False])
def test_a_batch_with_images_equals_what_torch_counts_in_the_engine(model_and_batch, share):
    """torch counts every matrix product, but not attention."""
    path, batch = model_and_batch
    optimizer = {"optimizer": lambda params: torch.optim.AdamW(params, lr=1e-4)}
    engine = make_engine("fsdp2", model=load_model(path), share_prompts=share, **optimizer)
    with FlopCounterMode(display=False) as counter:
        engine.infer_batch(batch)
    lengths = batch.lengths
    before = lengths[0] - 1
    segments = [(before, 0), (1, before), (2, before), (3, before)] if share else [(n, 0) for n in lengths[:3]]
    pairs = 2 * sum(n * b + n * (n + 1) // 2 for n, b in segments)
    images = 2 if share else 6
    attention = 4 * 2 * 128 * pairs + 4 * 64 * 2 * images * 16 * 16  # of two layers, and of two blocks of 4 x 4 patches
    flops, vocabulary = batch_flops(engine.config, batch, share_prompts=share), engine.config.text_config.vocab_size
    assert flops == counter.get_total_flops() + attention
    assert flops - batch_flops(engine.config, batch, share_prompts=share, head=False) == 2 * 128 * vocabulary * 12

    def loss_fn(out, mb):
        return -(out.logprobs * mb.mask).sum() / mb.total_tokens, {}

    with FlopCounterMode(display=False) as counter:
        engine.train_batch(batch, loss_fn)
    pixels = 2 * images * 16 * 1176 * 64  # pixels have no gradient
    assert 3 * flops == counter.get_total_flops() + 3 * attention + pixels


def mean_loss(out, mb):
    (x,) = out.tensors.values()
    return -(x * mb.mask).sum() / mb.total_tokens, {}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("kind", "passes"), [("language_model", 3), ("adapters", 2), ("value_model", 3)])
def test_an_engine_counts_its_passes(model_and_batch, kind, passes, share):
    """A training step is three forwards, or two with adapters; a value head is not counted."""
    path, batch = model_and_batch
    kinds = {"adapters": lambda model: lora(model, 2, 4.0), "value_model": with_value_head}
    model, head = kinds.get(kind, lambda model: model)(load_model(path)), kind != "value_model"
    options = {"share_prompts": share, "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-4)}
    engine = make_engine("fsdp2", "language_model" if head else kind, model=model, **options)
    take_flops()
    forward = batch_flops(engine.config, batch, share_prompts=share, head=head)
    outputs = ("logprobs",) if head else ("values",)
    engine.train_batch(batch, mean_loss, outputs)
    assert take_flops() == passes * forward and take_flops() == 0
    engine.infer_batch(batch, outputs)
    if head:
        engine.topk_logprobs(batch, 2)
        engine.hidden_states(batch)  # from which the caller computes logits
    assert take_flops() == (3 if head else 1) * forward


def test_each_rank_of_a_model_parallel_group_counts_its_share():
    batch = collate([append_response(prompt_sample([1, 2, 3]), [4], [-1.0])])
    group = SimpleNamespace(size=lambda: 4)
    engine = SimpleNamespace(config=QWEN2_5_VL_7B, known_outputs=("logprobs",), model_parallel_group=group)
    take_flops()
    count_pass(engine, batch, backward=True)
    assert take_flops() == 3 * batch_flops(QWEN2_5_VL_7B, batch) / 4


def test_a_rank_without_rows_has_no_flops():
    assert batch_flops(QWEN2_5_VL_7B, collate([])) == 0
    text = collate([append_response(prompt_sample([1, 2, 3]), [4], [-1.0])])
    assert batch_flops(QWEN2_5_VL_7B, text) == forward_flops(QWEN2_5_VL_7B, [(4, 0)], scored=1)


DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "head_dim": 32, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_the_gated_delta_rule_equals_what_torch_counts_in_linear_layers(kind):
    """Its convolution (4 wide, 96 channels) and its recurrence (4 heads, states of 8 x 16) are counted by hand."""
    more = {} if kind == "qwen3_5_text" else {**EXPERTS, "shared_expert_intermediate_size": 48}
    config, n = AutoConfig.for_model(kind, **SMALL, **DELTA, **more), 10
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.randint(0, 300, (1, n)))
    root = type(model).__name__
    counts = counter.get_flop_counts()
    delta = [name for name in counts if name.endswith(".linear_attn")]
    linear = sum(sum(counts[name].values()) for name in counts if ".linear_attn." in name)
    in_delta = sum(sum(counts[name].values()) for name in delta)
    assert len(delta) == 2 and root in counts
    upper = n * n - n * (n + 1) // 2
    expected = counter.get_total_flops() - in_delta + linear - 4 * 4 * 32 * upper
    expected += 2 * n * (2 * 4 * (2 * 16 + 64) + 6 * 4 * 8 * 16)
    assert forward_flops(config, [(n, 0)], scored=n) == expected
    after_prompt = forward_flops(config, [(4, 6)]) - forward_flops(config, [(4, 0)])
    assert after_prompt == 4 * 4 * 32 * 4 * 6  # attention to the prompt; linear layers continue from its last state


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("deepseek_v3", {}, "multi-head latent attention"), ("lfm2", {"layer_types": ["conv"] * 3}, "layers of conv"),
        ("gemma3n_text", {"num_kv_shared_layers": 0}, "embeddings of each layer"),
        ("glm4_moe", {}, "shared experts"), ("gemma4_unified_text", {}, "layers of several sizes"),
    ],
)  # fmt: skip
def test_families_with_other_layers_are_named(kind, options, why):
    config = AutoConfig.for_model(kind, **{**SMALL, **options})
    with pytest.raises(ValueError, match=f"expected a family whose FLOPs are known, got {kind}: its {why}"):
        forward_flops(config, [(4, 0)])
    text = collate([append_response(prompt_sample([1, 2, 3]), [4], [-1.0])])
    assert batch_flops(config, text) != batch_flops(config, text)  # nan
