"""Two steps of a tiny model by our engine on the batches that another trainer saw, and the file that keeps them."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlkit.advantages import rloo_advantages
from rlkit.data import Batch
from rlkit.engines import make_engine
from rlkit.losses import cispo_loss, ipo_loss, preference_mean, sequence_logprobs, token_mean

HERE = Path(__file__).parent
WORDS = 32  # the vocabulary
LR = 1e-2


def tiny_model(words=WORDS):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=words, num_attention_heads=2, num_key_value_heads=1, **sizes))


def copy_of(model):
    """The weights, each once: a tied head is left out."""
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=LR, eps=1e-4, weight_decay=0.0)  # a large eps, as in the engines' tests


def engine_steps(start, batches, loss_fn):
    """Train from the weights `start`, one step a batch; returns the losses and the weights after the last step."""
    model = tiny_model(len(start["model.embed_tokens.weight"]))
    model.load_state_dict(start)
    engine = make_engine("fsdp2", model=model, optimizer=lambda p: adamw(p), device="cpu", max_grad_norm=1e9)
    losses = torch.stack([torch.as_tensor(engine.train_batch(batch, loss_fn)["loss"]) for batch in batches])
    return losses, {name: x.detach().clone() for name, x in engine.get_per_tensor_param()}


def batch_of(tensors):
    """A batch of tokens, mask, lengths and any other tensors."""
    fields = dict(tensors)
    tokens, mask, lengths = (fields.pop(name) for name in ("tokens", "mask", "lengths"))
    return Batch(tokens, mask.bool(), lengths.tolist(), **fields)


def save(name, *, start, end, steps, losses, metadata):
    tensors = {f"start/{key}": x for key, x in start.items()} | {f"end/{key}": x for key, x in end.items()}
    for number, step in enumerate(steps):
        tensors |= {f"step{number}/{key}": x.clone() for key, x in step.items()}
    save_file({**tensors, "losses": losses.detach()}, HERE / f"{name}.safetensors", metadata)


def recorded(name):
    """start, end, steps and losses of a recorded run."""
    tensors = load_file(HERE / f"{name}.safetensors")

    def part(prefix):
        return {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}

    steps = [part(f"step{number}/") for number in range(len(tensors["losses"]))]
    return part("start/"), part("end/"), steps, tensors["losses"]


def same_training(found, start, end, losses):
    """Losses and weights are equal to rounding, and training moved the weights by far more than that."""
    found_losses, found_end = found
    torch.testing.assert_close(found_losses, losses, rtol=1e-4, atol=1e-6)
    moved = max((end[name] - start[name]).abs().max() for name in start)
    assert moved > 1e-3
    for name, x in end.items():
        torch.testing.assert_close(found_end[name], x, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def our_verl_steps(start, steps):
    """loss_mode=rlkit_cispo, adv_estimator=rlkit_rloo, clips of 0.01 and 0.02, as a recipe of ours has them."""
    groups = torch.arange(8) // 2

    def loss_fn(out, mb):
        loss = cispo_loss(out.logprobs, mb.old_logprobs, mb.advantages, mb.mask, clip_low=0.01, clip_high=0.02)
        return token_mean(loss, mb.mask, mb.total_tokens), {}

    batches = [batch_of(step).add(advantages=rloo_advantages(step["rewards"], groups)) for step in steps]
    return engine_steps(start, batches, loss_fn)


def reward_of(response):
    """A reward of a response's tokens that differs between most responses."""
    return (response % 5).float().mean()


def our_trl_steps(start, steps):
    """GRPOTrainer(loss=cispo_loss, advantages=rloo_advantages) with its default reduction, that of DAPO."""

    def loss_fn(out, mb):
        loss = cispo_loss(out.logprobs, mb.old_logprobs, mb.advantages, mb.mask, clip_low=0.01, clip_high=0.02)
        return token_mean(loss, mb.mask, mb.total_tokens), {}

    return engine_steps(start, [batch_of(step) for step in steps], loss_fn)


def our_trl_dpo_steps(start, steps):
    """DPOTrainer(loss=ipo_loss), rows of a pair beside each other; the reference is the model before training."""
    reference = tiny_model(len(start["model.embed_tokens.weight"]))
    reference.load_state_dict(start)
    scorer = make_engine("fsdp2", model=reference, device="cpu")
    batches = [batch_of(step) for step in steps]
    for batch in batches:
        batch.add(micro_batch_group=torch.arange(len(batch)) // 2)
        batch.add(ref_logprobs=scorer.infer_batch(batch)["logprobs"])

    def loss_fn(out, mb):
        chosen, rejected = sequence_logprobs(out.logprobs, mb.mask).view(-1, 2).T
        ref_chosen, ref_rejected = sequence_logprobs(mb.ref_logprobs, mb.mask).view(-1, 2).T
        return preference_mean(ipo_loss(chosen, rejected, ref_chosen, ref_rejected), mb.total_sequences / 2), {}

    return engine_steps(start, batches, loss_fn)
