"""`compute_loss_func` in Hugging Face's Trainer: two steps beside our engine's, and beside the model's own loss."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainingArguments

from rlkit.losses import dft_loss, token_mean
from rlkit.plugins.hf_trainer import compute_loss_func

sys.path.insert(0, str(Path(__file__).parent))
from two_steps import WORDS, adamw, batch_of, copy_of, engine_steps, same_training, tiny_model


def rows():
    g = torch.Generator().manual_seed(0)
    lengths = [7, 4, 9, 6]
    tokens = torch.zeros(4, 9, dtype=torch.long)
    mask = torch.zeros(4, 9, dtype=torch.bool)
    for b, length in enumerate(lengths):
        tokens[b, :length] = torch.randint(2, WORDS, (length,), generator=g)
        mask[b, 2:length] = True
    mask[0, 3:5] = False
    return {"tokens": tokens, "mask": mask, "lengths": torch.tensor(lengths)}


def train(folder, loss_func, **options):
    """All four rows in each of two steps, in two micro-batches; the losses that Trainer logs, and the weights."""
    data = rows()
    examples = [
        {"input_ids": tokens[:length], "labels": torch.where(mask, tokens, -100)[:length]}
        for tokens, mask, length in zip(data["tokens"], data["mask"], data["lengths"], strict=True)
    ]

    def collate(batch):
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad([row["input_ids"] for row in batch], batch_first=True)
        labels = pad([row["labels"] for row in batch], batch_first=True, padding_value=-100)
        attended = pad([torch.ones(len(row["input_ids"])) for row in batch], batch_first=True)
        return {"input_ids": ids, "labels": labels, "attention_mask": attended}

    model = tiny_model()
    start, optimizer = copy_of(model), adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    args = TrainingArguments(
        folder,
        use_cpu=True,
        report_to="none",
        max_steps=2,
        max_grad_norm=1e9,
        logging_steps=1,
        save_strategy="no",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(
        model,
        args,
        data_collator=collate,
        train_dataset=examples,
        compute_loss_func=loss_func,
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    losses = torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return start, copy_of(model), losses


def test_two_steps_are_those_of_our_engine(tmp_path):
    start, end, losses = train(tmp_path, compute_loss_func(dft_loss))

    def loss_fn(out, mb):
        return token_mean(dft_loss(out.logprobs, mb.mask), mb.mask, mb.total_tokens), {}

    same_training(engine_steps(start, [batch_of(rows())] * 2, loss_fn), start, end, losses)


def test_the_likelihood_is_the_models_own_loss(tmp_path):
    start, end, losses = train(tmp_path, None)
    _, ours, our_losses = train(tmp_path, compute_loss_func(lambda logprobs, mask: -logprobs))
    same_training((our_losses, ours), start, end, losses)


@pytest.mark.parametrize(
    ("outputs", "labels", "sentence"),
    [
        ({}, None, "labels: expected a tensor [B, T] in the batch, got None"),
        (
            SimpleNamespace(logits=None),
            torch.zeros(2, 3, dtype=torch.long),
            "logits: expected [B, T, V] for labels [2, 3] from the model, got None",
        ),
        (
            {"logits": torch.zeros(0, 3, 4)},
            torch.zeros(2, 3, dtype=torch.long),
            "logits: expected [B, T, V] for labels [2, 3] from the model, got shape [0, 3, 4]",
        ),
    ],
)
def test_what_cannot_be_scored_is_named(outputs, labels, sentence):
    with pytest.raises(ValueError) as error:
        compute_loss_func(dft_loss)(outputs, labels)
    assert str(error.value) == sentence
