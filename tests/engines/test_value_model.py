"""Value and reward models in the fsdp2 engine, compared with a linear layer on transformers' own hidden states."""

import copy
import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlkit.data import Batch
from rlkit.engines import make_engine
from rlkit.engines.value_head import has_value_head, load_value_model, scoring_batch, with_value_head
from rlkit.losses import bradley_terry_loss, clipped_value_loss, token_mean
from rlkit.runs.models import trained_part
from rlkit.runs.options import AdapterOptions
from rlkit.vlm import freeze, load_model, load_processor, lora, vision_tower_pattern

sys.path.insert(0, str(Path(__file__).parent))
from family_configs import BASE, BOTH, COMPASS, IMAGE, REFUSED, SMALL_VIT, TEXT
from rows import make_batch
from test_families import text_model, vision_model

LAYOUTS = {
    "shared": {},
    "packed": {"share_prompts": False},
    "padded": {"use_remove_padding": False},
    "micro_batches": {"micro_batch_tokens": 90},
    "checkpointing": {"enable_gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def processor(tiny_dir):
    return load_processor(tiny_dir)


def golden_head(size):
    return torch.randn(1, size, generator=torch.Generator().manual_seed(3)) / size**0.5


def with_golden_head(model, weight=None):
    """With a value head that is not all zeros, so that values can be compared."""
    model = with_value_head(model)
    head = model.get_output_embeddings()
    head.weight.data.copy_(golden_head(head.in_features) if weight is None else weight)
    return model


def engine_for(model, *, lr=1e-2, **options):
    options.setdefault("optimizer", lambda params: torch.optim.AdamW(params, lr=lr, eps=1e-4))
    return make_engine("fsdp2", "value_model", model=model, keep_gradients=True, **options)


def squared_loss(out, mb):
    loss = clipped_value_loss(out.values, out.values, mb.advantages[:, None].expand(mb.mask.shape), mb.mask, math.inf)
    return token_mean(loss, mb.mask, mb.total_tokens), {}


def gradients(engine):
    named = engine.module.named_parameters()
    return {n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for n, p in named if p.grad is not None}


def tiny_text(tied=True):
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return Qwen2ForCausalLM(
        Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)
    )


def text_batch(fill=0):
    """Responses to shared and unshared prompts; row 3 is trained on in two pieces, row 4 not at all."""
    g = torch.Generator().manual_seed(1)
    tokens, lengths = torch.randint(1, 60, (6, 9), generator=g), [9, 6, 8, 7, 3, 2]
    tokens[1, :4] = tokens[0, :4]
    mask = torch.zeros(6, 9, dtype=torch.bool)
    for row, columns in {0: range(4, 9), 1: range(4, 6), 2: range(1, 8), 3: (2, 3, 6), 5: range(0, 2)}.items():
        mask[row, list(columns)] = True
    tokens[torch.arange(9) >= torch.tensor(lengths)[:, None]] = fill
    return Batch(tokens, mask, lengths, advantages=torch.randn(6, generator=g))


def compare(engine, batch, values, loss, expected):
    torch.testing.assert_close(engine.infer_batch(batch)["values"], values, atol=1e-5, rtol=1e-5)
    metrics = engine.train_batch(batch, squared_loss)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    found = gradients(engine)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def expected_results(body, head, values, batch):
    """Values detached, loss, and gradients under the names of the whole model."""
    errors = (values - batch.advantages[:, None])[batch.mask & (torch.arange(batch.mask.shape[1]) > 0)]
    first = batch.advantages[batch.mask[:, 0]]  # column 0 has no prefix: value 0, no gradient
    loss = 0.5 * (errors.square().sum() + first.square().sum()) / batch.mask.sum()
    loss.backward()
    expected = {f"model.{n}": p.grad for n, p in body.named_parameters()}
    return values.detach(), loss.item(), {**expected, "lm_head.weight": head.grad}


@pytest.fixture(scope="module")
def plain_vlm(tiny_dir, processor):
    """transformers' own body, row by row with its own position ids, and a linear layer on the previous token."""
    model, batch = load_model(tiny_dir), make_batch(processor)
    head, values = golden_head(128).requires_grad_(), torch.zeros(batch.tokens.shape)
    for b, length in enumerate(batch.lengths):
        ids = batch.tokens[b : b + 1, :length]
        kinds = (ids == model.config.image_token_id).int()
        hidden = model.model(input_ids=ids, mm_token_type_ids=kinds, **batch.vision[b]).last_hidden_state[0]
        for t in range(1, length):
            if batch.mask[b, t]:
                values[b, t] = hidden[t - 1] @ head[0]
    return expected_results(model.model, head, values, batch)


@pytest.fixture(scope="module")
def plain_text():
    """One padded forward of transformers' own body."""
    body, batch, head = tiny_text().model, text_batch(), golden_head(32).requires_grad_()
    hidden = body(input_ids=batch.tokens, attention_mask=batch.attention_mask.long()).last_hidden_state
    values = torch.zeros(batch.tokens.shape)
    values[:, 1:] = torch.where(batch.mask[:, 1:], (hidden[:, :-1] @ head.T)[..., 0], 0.0)
    return expected_results(body, head, values, batch)


@pytest.mark.parametrize("name", LAYOUTS)
def test_images_every_layout_equals_transformers(tiny_dir, processor, plain_vlm, name):
    engine = engine_for(with_golden_head(load_model(tiny_dir)), max_grad_norm=1e9, **LAYOUTS[name])
    compare(engine, make_batch(processor), *plain_vlm)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_text_every_layout_equals_transformers(plain_text, name, tied):
    """Tied or not, the body is the same: its embedding keeps its values and gets no gradient from the head."""
    options = {**LAYOUTS[name], **({"micro_batch_tokens": 9} if name == "micro_batches" else {})}
    compare(engine_for(with_golden_head(tiny_text(tied)), max_grad_norm=1e9, **options), text_batch(), *plain_text)


def test_a_value_is_that_of_the_prefix_before_its_token():
    """The golden head reads channel 5 of the last hidden state: the value of token t is that channel at t - 1."""
    batch = text_batch()
    hidden = tiny_text().model(batch.tokens, batch.attention_mask.long()).last_hidden_state
    values = engine_for(with_golden_head(tiny_text(), torch.eye(32)[5:6])).infer_batch(batch)["values"]
    for b, t in batch.mask.nonzero().tolist():
        expected = hidden[b, t - 1, 5].item() if t else 0.0
        assert values[b, t].item() == pytest.approx(expected, abs=1e-5), (b, t)
    assert (values[~batch.mask] == 0).all()
    changed = text_batch()
    changed.tokens[0, 6] += 1  # a token affects only the values after it
    engine = engine_for(with_golden_head(tiny_text(), torch.eye(32)[5:6]))
    difference = engine.infer_batch(changed)["values"][0] - values[0]
    assert difference[:7].abs().max() < 1e-6 < difference[7:].abs().min()


def test_the_new_head_is_zero_and_untied():
    model, weight = tiny_text(), tiny_text().get_input_embeddings().weight
    assert with_value_head(model) is model and has_value_head(model) and not has_value_head(tiny_text())
    assert torch.equal(model.get_input_embeddings().weight, weight)
    assert model.lm_head.weight.shape == (1, 32) and not model.lm_head.weight.any() and model.lm_head.bias is None
    model.tie_weights()
    assert has_value_head(model) and model.lm_head.weight is not model.get_input_embeddings().weight
    assert not engine_for(model).infer_batch(text_batch())["values"].any()


@pytest.mark.parametrize("family", ["gemma2", "gemma3n_text", "recurrent_gemma"])
def test_values_are_not_capped(family):
    """Gemma soft-caps the output of its output layer at 30."""
    options = REFUSED[family][0] if family in REFUSED else TEXT[family]
    model = with_golden_head(text_model(family, options), torch.full((1, 32), 100.0))
    hidden = model.model(torch.arange(5)[None]).last_hidden_state
    values, terms = model(torch.arange(5)[None]).logits, 100 * hidden.double()
    rounding = 1e-6 * terms.abs().sum(-1, keepdim=True)  # of terms that nearly cancel; 3e-8 of their sum was seen
    assert ((values - terms.sum(-1, keepdim=True)).abs() <= rounding).all()
    assert values.abs().max() > 40


SCALED = {
    "cohere": {"logit_scale": 0.0625},
    "cohere2": TEXT["cohere2"],
    "cohere_compass_text": COMPASS,
    "granite": TEXT["granite"],
    "granitemoehybrid": {**TEXT["granitemoehybrid"], "logits_scaling": 8.0},
    "falcon_h1": {**TEXT["falcon_h1"], "lm_head_multiplier": 0.5, "embedding_multiplier": 3.0},
    "hyperclovax": {"logits_scaling": 0.5},
    "minicpm3": {
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "num_key_value_heads": 4, "dim_model_base": 4,
    },
}  # fmt: skip


def muse_glimmer():
    vision = {**SMALL_VIT, "layer_types": ["full_attention"]}
    config = AutoConfig.for_model(
        "muse_glimmer", text_config={**BASE, "layer_types": BOTH}, vision_config=vision, image_token_id=IMAGE
    )
    return AutoModelForImageTextToText.from_config(config).eval()


@pytest.mark.parametrize("family", [*SCALED, "cohere_compass", "muse_glimmer"])
def test_values_are_not_scaled_as_logits_are(family):
    """Nor are those of a copy made from the config, as engines make."""
    makers = {"cohere_compass": lambda: vision_model("cohere_compass"), "muse_glimmer": muse_glimmer}
    model = with_golden_head(makers[family]() if family in makers else text_model(family, SCALED[family]))
    tokens = torch.arange(3, 8)[None]
    expected = model.base_model(tokens).last_hidden_state @ golden_head(32).T
    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-6, rtol=1e-5)
    copied = type(model)._from_config(copy.deepcopy(model.config))
    with_value_head(copied).load_state_dict(model.state_dict())
    torch.testing.assert_close(copied.eval()(tokens).logits, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["minicpm3", "cohere_compass_text"])
def test_a_classifier_of_a_family_that_scales_logits_is_read_and_exported(family, tmp_path):
    config = AutoConfig.for_model(family, **BASE | SCALED[family], num_labels=1)
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_config(config).eval()
    classifier.save_pretrained(tmp_path / "classifier")
    tokens = torch.randint(3, 80, (3, 7))
    expected = classifier(tokens).logits[:, 0]
    engine = engine_for(load_value_model(tmp_path / "classifier"))
    rows = scoring_batch(Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), [7] * 3))
    torch.testing.assert_close(engine.infer_batch(rows)["values"].sum(1), expected, atol=1e-6, rtol=1e-5)
    engine.export_hf(tmp_path / "exported")
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    torch.testing.assert_close(exported(tokens).logits[:, 0], expected, atol=1e-6, rtol=1e-5)


def test_values_in_bfloat16_are_not_rounded(tiny_dir, processor):
    """The head works in float32: most values are no bfloat16 numbers."""
    batch = make_batch(processor)
    exact = engine_for(with_golden_head(load_model(tiny_dir))).infer_batch(batch)["values"]
    engine = engine_for(with_golden_head(load_model(tiny_dir)), compute_dtype=torch.bfloat16)
    values = engine.infer_batch(batch)["values"]
    assert 1e-5 < (values - exact).abs().max() < 0.1
    masked = values[batch.mask]
    assert (masked != masked.bfloat16().float()).float().mean() > 0.9
    engine.train_batch(batch, squared_loss)
    assert all(g.isfinite().all() and g.dtype == torch.float32 for g in gradients(engine).values())


def test_a_head_on_weights_in_bfloat16_is_in_float32():
    """Otherwise values are rounded, and updates of the head below half its rounding are lost."""
    model, exact = with_golden_head(tiny_text().bfloat16()), with_golden_head(tiny_text())
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state
        assert hidden.dtype == torch.bfloat16
        assert torch.equal(model(tokens).logits, hidden.float() @ golden_head(32).T)
    engine, batch = engine_for(model, lr=1e-5, compute_dtype=torch.bfloat16), text_batch()
    values = engine.infer_batch(batch)["values"]
    masked = values[batch.mask]
    assert (masked != masked.bfloat16().float()).float().mean() > 0.9
    assert 1e-5 < (values - engine_for(exact).infer_batch(batch)["values"]).abs().max() < 0.1
    engine.train_batch(batch, squared_loss)
    change = dict(engine.get_per_tensor_param())["lm_head.weight"] - golden_head(32)
    assert 0 < change.abs().min() and change.abs().max() < 2e-5


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_head_is_read_in_float32_beside_weights_in_bfloat16(tmp_path, on_meta):
    path = str(tmp_path / "critic")
    with_golden_head(tiny_text()).save_pretrained(path)
    model = load_value_model(path, dtype=torch.bfloat16, on_meta=on_meta)
    engine = engine_for(model, compute_dtype=torch.bfloat16)
    for again in (str(tmp_path / "again"), str(tmp_path / "third")):
        weights = dict(engine.get_per_tensor_param())
        assert torch.equal(weights["lm_head.weight"], golden_head(32))
        assert {x.dtype for name, x in weights.items() if name != "lm_head.weight"} == {torch.bfloat16}
        engine.export_hf(again)
        engine = engine_for(load_value_model(again, dtype=torch.bfloat16, on_meta=on_meta))


def test_a_classifier_in_a_pickle_is_read(tmp_path):
    engine_for(with_golden_head(tiny_text())).export_hf(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(load_value_model(tmp_path).lm_head.weight, golden_head(32))


def test_a_critic_learns_a_constant_return(tiny_dir, processor):
    """From zeros, on images, with a frozen vision tower: the loss falls, and all other weights change."""
    model = with_value_head(load_model(tiny_dir))
    freeze(model, vision_tower_pattern(model))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    engine, batch = engine_for(model, lr=2e-3, micro_batch_tokens=150), make_batch(processor)
    batch.advantages.fill_(0.7)
    losses = [engine.train_batch(batch, squared_loss)["loss"] for _ in range(8)]
    assert losses[0] == pytest.approx(0.5 * 0.7**2, rel=1e-5)
    assert losses[-1] < 0.05 * losses[0]
    assert not any(".visual." in name for name in gradients(engine))
    for name, tensor in engine.get_per_tensor_param():
        assert torch.equal(tensor, before[name]) == (".visual." in name), name


def test_lora_trains_adapters_and_the_head(tiny_dir, processor):
    batch = make_batch(processor)
    engine = engine_for(with_value_head(lora(load_model(tiny_dir), 4, 8)), lr=1e-3)
    losses = [engine.train_batch(batch, squared_loss)["loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    assert all(".lora_" in name or name.endswith("lm_head.weight") for name in gradients(engine))
    values = engine.infer_batch(batch)["values"]
    plain = with_value_head(load_model(tiny_dir))
    merged = dict(engine.get_per_tensor_param())
    assert merged.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(merged)
    torch.testing.assert_close(engine_for(plain).infer_batch(batch)["values"], values, atol=1e-5, rtol=1e-5)


def test_resume_is_exact(tmp_path):
    batch, steps = text_batch(), []
    engine = engine_for(with_value_head(tiny_text()))
    for i in range(4):
        if i == 2:
            engine.save_checkpoint(tmp_path / "step_2", {"step": 2})
        steps.append(engine.train_batch(batch, squared_loss))
    other = engine_for(with_value_head(tiny_text()))
    assert other.load_checkpoint(tmp_path / "step_2") == {"step": 2}
    assert [other.train_batch(batch, squared_loss) for _ in range(2)] == steps[2:]
    language = make_engine("fsdp2", model=tiny_text(tied=False))
    with pytest.raises(ValueError, match="step_2: expected the state of this model"):
        language.load_checkpoint(tmp_path / "step_2")


def test_export_loads_with_its_head(tiny_dir, processor, tmp_path):
    batch = make_batch(processor)
    engine = engine_for(load_value_model(tiny_dir), processor=processor)
    engine.train_batch(batch, squared_loss)
    engine.train_batch(batch, squared_loss)
    values = engine.infer_batch(batch)["values"]
    assert values[batch.mask].abs().min() > 0
    path = str(tmp_path / "critic")
    engine.export_hf(path)
    again = engine_for(load_value_model(path)).infer_batch(batch)["values"]
    torch.testing.assert_close(again, values, atol=1e-6, rtol=1e-6)
    with pytest.raises(
        ValueError, match="model: expected a language model, got the value model .*; use load_value_model"
    ):
        load_model(path)
    assert not load_value_model(tiny_dir).lm_head.weight.any()


def test_export_is_loaded_from_modelscope(tiny_dir, tmp_path, monkeypatch):
    folder = str(tmp_path / "critic")
    engine_for(with_golden_head(load_model(tiny_dir))).export_hf(folder)
    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(snapshot_download=lambda name: folder))
    loaded = load_value_model("modelscope:owner/critic")
    assert torch.equal(loaded.lm_head.weight, load_value_model(folder).lm_head.weight) and loaded.lm_head.weight.any()


def test_export_in_several_files(tmp_path):
    """Loading does not show transformers' warning about the shape of the head."""
    model, handler = with_golden_head(tiny_text()), logging.Handler()
    model.save_pretrained(tmp_path / "critic", max_shard_size="20KB")
    assert len(list(tmp_path.glob("critic/*.safetensors"))) > 2
    handler.emit = lambda record: pytest.fail(record.getMessage())
    logging.getLogger("transformers").addHandler(handler)
    try:
        loaded = load_value_model(str(tmp_path / "critic"))
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert logging.getLogger("transformers").isEnabledFor(logging.WARNING)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("columns", [0, 5])
def test_export_with_a_missing_or_cut_weight(tmp_path, name, columns):
    with_golden_head(tiny_text()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weight = weights.pop(name)
    if columns:
        weights[name] = weight[..., :columns].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"expected every weight in its shape, got missing or different ones: {name}"):
        load_value_model(str(tmp_path))


def test_a_reward_model_is_read_after_the_last_token(tiny_dir, processor):
    batch = text_batch(fill=59)
    hidden = tiny_text().model(batch.tokens, batch.attention_mask.long()).last_hidden_state
    expected = torch.stack([golden_head(32)[0] @ hidden[b, n - 1] for b, n in enumerate(batch.lengths)])
    before, scoring = copy.deepcopy(batch.tokens), scoring_batch(batch)
    for name in LAYOUTS:
        scores = engine_for(with_golden_head(tiny_text()), **LAYOUTS[name]).infer_batch(scoring)["values"].sum(1)
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5, msg=name)
    assert torch.equal(batch.tokens, before) and scoring.lengths == [n + 1 for n in batch.lengths]
    assert scoring.total_tokens == scoring.total_sequences == len(batch)
    assert torch.equal(scoring.advantages, batch.advantages)
    images = scoring_batch(make_batch(processor))
    assert images.rollout_logprobs.shape == images.tokens.shape
    engine = engine_for(with_golden_head(load_model(tiny_dir)))
    in_order = engine.infer_batch(images)["values"].sum(1)
    order = [5, 0, 8, 3, 1, 7, 2, 6, 4]
    shuffled = engine.infer_batch(scoring_batch(make_batch(processor, rows=order)))["values"].sum(1)
    torch.testing.assert_close(shuffled, in_order[order], atol=1e-5, rtol=1e-5)


def test_a_reward_model_of_gemma_3n_has_gradients():
    """They are nan for a token whose embedding is zeros, as that of padding."""
    model = text_model("gemma3n_text", TEXT["gemma3n_text"])
    assert not model.get_input_embeddings().weight[0].any()
    engine = engine_for(with_value_head(model))

    def loss_fn(out, mb):
        return (out.values.sum(1) - 1).square().sum(), {}

    metrics = engine.train_batch(scoring_batch(text_batch()), loss_fn)
    assert 0 < metrics["grad_norm"] < math.inf


def test_a_reward_model_learns_which_is_better():
    batch = scoring_batch(text_batch())
    batch.add(micro_batch_group=torch.tensor([0, 1, 2, 0, 1, 2]), better=torch.tensor([1, 1, 1, 0, 0, 0]))

    def loss_fn(out, mb):
        scores = out.values.sum(1)
        pairs = [(mb.micro_batch_group == k) for k in mb.micro_batch_group.unique()]
        chosen = torch.stack([scores[pair & (mb.better == 1)][0] for pair in pairs])
        rejected = torch.stack([scores[pair & (mb.better == 0)][0] for pair in pairs])
        return 2 * bradley_terry_loss(chosen, rejected).sum() / mb.total_sequences, {}

    engine = engine_for(with_value_head(tiny_text()), micro_batch_tokens=20)
    losses = [engine.train_batch(batch, loss_fn)["loss"] for _ in range(6)]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < 0.5 * losses[0]
    scores = engine.infer_batch(batch)["values"].sum(1)
    assert (scores[:3] > scores[3:]).all()


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}], ids=["full", "lora"])
def test_freeze_leaves_the_head_to_train(options):
    """Its name is that of a language model's output layer, which the pattern for training the projector alone has."""
    cfg = AdapterOptions(freeze="embed_tokens|lm_head", **options)
    model = trained_part(cfg, with_value_head(tiny_text()), head=True)
    trains = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("lm_head" in name for name in trains) and not any("embed_tokens" in name for name in trains)
    engine = engine_for(model)
    losses = [engine.train_batch(text_batch(), squared_loss)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]


def test_bad_input_is_named():
    batch = text_batch()
    language, value = make_engine("fsdp2", model=tiny_text()), engine_for(with_value_head(tiny_text()))
    with pytest.raises(ValueError, match="outputs: expected values; got logprobs"):
        value.infer_batch(batch, ("values", "logprobs"))
    with pytest.raises(ValueError, match="outputs: expected values; got logprobs"):
        value.train_batch(batch, squared_loss, ("logprobs",))
    with pytest.raises(ValueError, match="outputs: expected logprobs, entropy; got values"):
        language.infer_batch(batch, ("values",))
    expected = r"model: expected a value head, got none; use rlkit.engines.value_head.with_value_head\(model\)"
    with pytest.raises(ValueError, match=expected):
        engine_for(tiny_text())
    expected = r"model: expected a language model, got a value head; use make_engine\(..., \"value_model\", ...\)"
    with pytest.raises(ValueError, match=expected):
        make_engine("fsdp2", model=with_value_head(tiny_text()))
    expected = "model: expected a value head that trains, got a frozen one; add it after lora.*what freeze"
    with pytest.raises(ValueError, match=expected):
        engine_for(lora(with_value_head(tiny_text()), 2, 4))
    expected = "model: expected a causal LM or VLM, got Qwen2Model, which has no output layer"
    with pytest.raises(ValueError, match=expected):
        with_value_head(tiny_text().model)
    expected = "out.logprobs: expected one of the requested outputs, values; got 'logprobs'"
    with pytest.raises(AttributeError, match=expected):
        value.train_batch(batch, lambda out, mb: (out.logprobs.sum(), {}))
    with pytest.raises(ValueError, match="backend: expected .*; got 'fsdp3' for a 'value_model' on 'cpu'"):
        make_engine("fsdp3", "value_model", device="cpu", model=None)
