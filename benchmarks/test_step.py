"""A GRPO step of rlkit compared with a bare Hugging Face loop on the same work.

    pytest benchmarks/test_step.py --benchmark-enable --benchmark-group-by=param:what

Both have the same tiny Qwen2.5-VL, the same prompts with one image each, the same group size and lengths. `sample`
generates the responses, `update` trains on given responses, `step` does both. The bare loop uses only transformers:
`generate` with num_return_sequences, a padded forward and AdamW.
"""

import pytest
import torch
import torch.nn.functional as F

from rlkit.data import append_response, collate, load_task, step_rows
from rlkit.engines import make_engine
from rlkit.losses import clipped_policy_loss, token_mean
from rlkit.rollout import Sampling, make_rollout
from rlkit.vlm import build_tiny, encode_prompts, load_model, load_processor, suppressed_token_ids

PROMPTS, GROUP, NEW = 16, 8, 4


class Work:
    """The inputs of both contestants."""

    def __init__(self, path):
        self.path = str(path)
        self.processor = load_processor(self.path)
        self.rows = step_rows(load_task("digits").train, 0, PROMPTS, 0)
        self.prompts, _ = encode_prompts(self.processor, self.rows)
        g = torch.Generator().manual_seed(0)
        tokens = torch.randint(20, 200, (PROMPTS * GROUP, NEW), generator=g).tolist()
        parents = [p for p in self.prompts for _ in range(GROUP)]
        self.samples = [append_response(p, ids, [-5.0] * NEW) for p, ids in zip(parents, tokens, strict=True)]
        self.advantages = torch.randn(len(self.samples), generator=g)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny(path, load_task("digits").train, warm_up_steps=0)
    return Work(path)


class Ours:
    def __init__(self, work):
        self.work = work
        model = load_model(work.path)
        self.engine = make_engine(
            "fsdp2",
            model=model,
            device="cpu",
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-5),
            suppressed_token_ids=suppressed_token_ids(model.config, work.processor.tokenizer),
        )
        self.rollout = make_rollout("hf", self.engine.gathered, processor=work.processor)

    def sample(self):
        return self.rollout.generate(self.work.prompts, Sampling(NEW), n=GROUP)

    def update(self):
        batch = collate(self.work.samples, advantages=self.work.advantages)

        def loss_fn(out, mb):
            old = out.logprobs.detach()
            loss = clipped_policy_loss(out.logprobs, old, mb.advantages, mb.mask)
            return token_mean(loss, mb.mask, mb.total_tokens), {}

        return self.engine.train_batch(batch, loss_fn)["grad_norm"]


class BareLoop:
    def __init__(self, work):
        self.work, self.model = work, load_model(work.path)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.suppressed = suppressed_token_ids(self.model.config, work.processor.tokenizer)
        questions = [
            work.processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["question"]}]}],
                add_generation_prompt=True,
                tokenize=False,
            )
            for _, row in work.rows
        ]
        images = [row["images"] for _, row in work.rows]
        self.inputs = work.processor(text=questions, images=images, padding=True, return_tensors="pt")

    def sample(self):
        self.model.eval()
        return self.model.generate(
            **self.inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=NEW,
            num_return_sequences=GROUP, suppress_tokens=self.suppressed.tolist(),
        )  # fmt: skip

    def update(self):
        self.model.train()
        batch = collate(self.work.samples, advantages=self.work.advantages)
        vision = {k: torch.cat([v[k] for v in batch.vision]) for k in batch.vision[0]}
        kinds = (batch.tokens == self.model.config.image_token_id).int()
        mask = batch.attention_mask.long()
        logits = self.model(
            input_ids=batch.tokens, attention_mask=mask, mm_token_type_ids=kinds, logits_to_keep=NEW + 1, **vision
        ).logits[:, :-1]
        logits = logits.index_fill(-1, self.suppressed, float("-inf"))
        logprobs = -F.cross_entropy(logits.transpose(1, 2), batch.tokens[:, -NEW:], reduction="none")
        ratio = (logprobs - logprobs.detach()).exp()
        advantages = batch.advantages[:, None]
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return norm.item()


CONTESTANTS = {"rlkit": Ours, "bare_loop": BareLoop}


@pytest.mark.parametrize("what", ["sample", "update", "step"])
@pytest.mark.parametrize("name", CONTESTANTS)
def test_step(benchmark, work, name, what):
    contestant = CONTESTANTS[name](work)

    def step():
        contestant.sample()
        contestant.update()

    if what == "update":  # the times are comparable only if the gradients are the same
        benchmark.extra_info["grad_norm"] = contestant.update()
        assert benchmark.extra_info["grad_norm"] == pytest.approx(Ours(work).update(), rel=1e-3)
    benchmark.pedantic(step if what == "step" else getattr(contestant, what), rounds=15, warmup_rounds=3)
