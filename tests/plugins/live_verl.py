"""rlkit inside verl itself: its registries, its advantages and its workers' loss; `make peers` runs it.

.venv-peers/bin/python tests/plugins/live_verl.py    # records the two steps that test_recorded.py repeats
"""

import os
import subprocess
import sys
from importlib.metadata import version
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

sys.path.insert(0, str(Path(__file__).parent))
from two_steps import WORDS, adamw, copy_of, our_verl_steps, same_training, save, tiny_model  # noqa: E402

from rlkit import advantages as A  # noqa: E402
from rlkit import losses as L  # noqa: E402
from rlkit.plugins.verl import ADVANTAGES, LOSSES, register_advantages, register_loss  # noqa: E402

OPTIONS = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.4, "clip_ratio_c": 2.5, "tau_pos": 2.0, "tau_neg": 0.7}
POLICY = {
    "clip_cov_ratio": 0.2,
    "clip_cov_lb": 0.05,
    "clip_cov_ub": 0.8,
    "kl_cov_ratio": 0.3,
    "ppo_kl_coef": 0.6,
    "dro_beta": 0.3,
}
EXPECTED = {  # what those options are to the losses, written down a second time
    "clip_low": 0.1,
    "clip_high": 0.4,
    "dual_clip": 2.5,
    "log_clip_low": 0.1,
    "log_clip_high": 0.4,
    "delta_low": 0.1,
    "delta_high": 0.4,
    "ratio_high": 2.5,
    "tau_pos": 2.0,
    "tau_neg": 0.7,
    "cov_low": 0.05,
    "cov_high": 0.8,
}
OWN = {"clip_cov_loss": {"share": 0.2}, "kl_cov_loss": {"share": 0.3, "kl_coef": 0.6}, "dro_loss": {"kl_coef": 0.3}}
REDUCE = {
    "token-mean": lambda x, m: L.token_mean(x, m, 61),
    "seq-mean-token-mean": lambda x, m: L.sequence_mean(x, m, 16),
    "seq-mean-token-sum": lambda x, m: L.sequence_sum_mean(x, m, 16),
    "seq-mean-token-sum-norm": lambda x, m: L.fixed_length_mean(x, m, 50, 16),
}


def actor(loss_mode, **options):
    policy = PolicyLossConfig(loss_mode=loss_mode, **POLICY)
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy, **options)


def rows(seed=0):
    """8 rows: a prompt of 2 to 4 tokens, a response of 3 to 9; two have tool output, one is not trained on."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 10, (8,), generator=g)
    prompts = [torch.randint(2, WORDS, (int(n),), generator=g) for n in torch.randint(2, 5, (8,), generator=g)]
    responses = [torch.randint(2, WORDS, (int(n),), generator=g) for n in lengths]
    masks = [torch.ones(int(n), dtype=torch.long) for n in lengths]
    for row in (0, 3):
        masks[row][1] = 0
    masks[5][:] = 0
    return prompts, responses, masks


def nested(tensors):
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def verl_batch(prompts, responses, masks, *, dp_size, tokens, sequences, **per_token):
    """What verl's driver sends a worker: nested tensors of the responses, and the counts of the global batch."""
    tracks = {"prompts": prompts, "responses": responses, "response_mask": masks}
    data = TensorDict({name: nested(rows) for name, rows in tracks.items()}, [len(masks)])
    for name, x in per_token.items():
        data[name] = nested([row[: len(mask)] for row, mask in zip(x, masks, strict=True)])
    tu.assign_non_tensor(data, dp_size=dp_size, batch_num_tokens=tokens, global_batch_size=sequences)
    return data


def padded(tensors):
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


@pytest.fixture(autouse=True)
def same_draws(monkeypatch):
    """clip_cov_loss draws the tokens that it detaches; here the draw is the same on both sides."""
    monkeypatch.setattr(torch, "rand_like", lambda x, **_: torch.linspace(0, 0.99, x.numel()).view(x.shape))


@pytest.mark.parametrize("mode", REDUCE)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_every_loss_through_the_loss_of_verls_workers(loss, mode):
    prompts, responses, masks = rows()
    mask = padded(masks).bool()
    g = torch.Generator().manual_seed(1)
    old = -3 * torch.rand(mask.shape, generator=g)
    drift = torch.tensor([0.5, 0.002, 0.5, 0.5, 0.002, 0.5, 0.5, 0.5])[:, None]
    new = old + drift * torch.randn(mask.shape, generator=g)
    advantages = torch.randn(8, 1, generator=g).expand(mask.shape)
    weights = 0.2 + torch.rand(mask.shape, generator=g)

    theirs, ours = new.clone().requires_grad_(), new.clone().requires_grad_()
    per_token = {"old_log_probs": old, "advantages": advantages, "rollout_is_weights": weights}
    data = verl_batch(prompts, responses, masks, dp_size=2, tokens=61, sequences=16, **per_token)
    # a model's output speaks of the next token: the response's log-probabilities begin at the prompt's last token
    output = [
        torch.cat([torch.zeros(len(p) - 1), x[: len(a)], torch.zeros(1)])
        for p, a, x in zip(prompts, responses, theirs, strict=True)
    ]
    config = actor(f"rlkit_{loss.__name__.removesuffix('_loss')}", loss_agg_mode=mode, loss_scale_factor=50, **OPTIONS)
    found, metrics = ppo_loss(config, {"log_probs": nested(output)}, data)

    given = EXPECTED | OWN.get(loss.__name__, {}) | {"uniform": torch.rand_like(new)}
    given = {name: given[name] for name in signature(loss).parameters if name in given}
    expected = 2 * REDUCE[mode](weights * loss(ours, old, advantages, mask, **given), mask)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, theirs)[0], torch.autograd.grad(expected, ours)[0], rtol=1e-5, atol=1e-7
    )
    kl = L.token_mean(L.kl_k1(old, new, mask), mask).item()
    assert metrics["actor/ppo_kl"].aggregate() == pytest.approx(kl)
    assert found.abs() > 1e-4


UID = np.array(["cat", "dog", "cat", "elk", "dog", "cat", "dog", "cat"], dtype=object)  # elk is alone
GROUPS = torch.tensor([4, 1, 4, 7, 1, 4, 1, 4])


@pytest.mark.parametrize("advantages", ADVANTAGES, ids=lambda function: function.__name__)
def test_every_advantage_through_verls_driver(advantages):
    masks = padded(rows()[2])
    mask = masks.bool()
    g = torch.Generator().manual_seed(2)
    token_rewards = torch.where(mask, -0.1 * torch.rand(mask.shape, generator=g), 0)  # of the KL in the reward
    token_rewards[:, -1] += torch.randint(0, 3, (8,), generator=g)  # where no token is trained on, too
    token_rewards = torch.where(mask.any(1, keepdim=True), token_rewards, 0)
    if "mask" in signature(advantages).parameters:
        token_rewards = torch.where(mask, token_rewards, 0)
    data = DataProto.from_single_dict({"token_level_rewards": token_rewards, "response_mask": masks, "uid": UID})
    name = f"rlkit_{advantages.__name__.removesuffix('_advantages')}"
    found = compute_advantage(data, name, config=AlgoConfig(gamma=0.9)).batch["advantages"]

    rewards = token_rewards.sum(1)
    ours = {
        "reinforce_plus_plus": lambda: A.reinforce_plus_plus_advantages(token_rewards, mask, gamma=0.9),
        "reinforce_plus_plus_baseline": lambda: A.reinforce_plus_plus_baseline_advantages(
            rewards, GROUPS, lengths=mask.sum(1)
        ),
        "opo": lambda: A.opo_advantages(rewards, GROUPS, mask.sum(1)),
    }.get(name.removeprefix("rlkit_"), lambda: advantages(rewards, GROUPS))()
    expected = ours if ours.ndim == 2 else A.expand_to_tokens(ours, mask)
    torch.testing.assert_close(found, expected)
    assert found.abs().max() > 0.1


def test_a_function_of_your_own_with_a_number_of_its_own():
    from functools import partial

    register_loss("own_cispo", partial(L.cispo_loss, clip_high=4.0))
    register_advantages("own_passk", partial(A.passk_advantages, k=2))
    old, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.float)
    new, advantages = torch.full((2, 3), 1.0), torch.ones(2, 3)
    config = actor("own_cispo", clip_ratio_high=0.3)
    found, _ = POLICY_LOSS_REGISTRY["own_cispo"](old, new, advantages, mask, "token-mean", config)
    assert found.item() == pytest.approx(-torch.e)  # not clipped at 1.3
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    found, _ = ADV_ESTIMATOR_REGISTRY["own_passk"](rewards, torch.ones(4, 2), index=np.zeros(4))
    assert torch.equal(found[:, 0], A.passk_advantages(rewards.sum(1), torch.zeros(4, dtype=torch.long), k=2))


def test_a_batch_without_prompts_ids_is_refused():
    with pytest.raises(ValueError, match="adv_estimator=rlkit_rloo: expected the prompts' ids"):
        ADV_ESTIMATOR_REGISTRY["rlkit_rloo"](torch.zeros(2, 2), torch.ones(2, 2))


@pytest.mark.parametrize(
    "settings",
    [{}, {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "rlkit.plugins.verl"}],
    ids=["entry_point", "external_module"],
)
def test_verl_loads_it_by_itself(settings, tmp_path):
    code = (
        "import verl\nfrom verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn\n"
        "print(get_policy_loss_fn('rlkit_cispo').__module__, get_adv_estimator_fn('rlkit_rloo').__module__)"
    )
    env = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"} | settings
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["rlkit.plugins.verl"] * 2, done.stderr


def two_steps():
    """verl's advantages and workers' loss, two micro-batches a step, two steps on one batch; the tensors of it all."""
    prompts, responses, masks = rows(seed=3)
    mask = padded(masks)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 0.0, 0.0, 1.0])
    data = DataProto.from_single_dict(
        {
            "token_level_rewards": torch.nn.functional.pad(rewards[:, None], (mask.shape[1] - 1, 0)),
            "response_mask": mask,
            "uid": np.array(list("aabbccdd"), dtype=object),
        }
    )
    advantages = compute_advantage(data, "rlkit_rloo", config=AlgoConfig()).batch["advantages"]
    model = tiny_model()
    start, optimizer = copy_of(model), adamw(model.parameters())
    tokens = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]

    def next_logprobs(row):
        """What verl's engines return for a row: at each token the log-probability of the next one."""
        scores = model(row[None]).logits[0].log_softmax(-1)
        return torch.cat([scores[:-1].gather(1, row[1:, None])[:, 0], torch.zeros(1)])

    with torch.no_grad():
        old = padded([next_logprobs(t)[len(p) - 1 : -1] for t, p in zip(tokens, prompts, strict=True)])
    config, losses = actor("rlkit_cispo", clip_ratio_low=0.01, clip_ratio_high=0.02), []
    counts = {"dp_size": 1, "tokens": int(mask.sum()), "sequences": 8}
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(0.0)
        for part in (slice(0, 3), slice(3, 8)):
            fields = {"old_log_probs": old[part], "advantages": advantages[part]}
            micro = verl_batch(prompts[part], responses[part], masks[part], **counts, **fields)
            loss, _ = ppo_loss(config, {"log_probs": nested([next_logprobs(row) for row in tokens[part]])}, micro)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()

    def beside_prompts(x):
        rows = zip(prompts, responses, x, strict=True)
        return padded([torch.cat([x.new_zeros(len(prompt)), row[: len(response)]]) for prompt, response, row in rows])

    step = {"tokens": padded(tokens), "lengths": torch.tensor([len(row) for row in tokens])}
    step |= {"mask": beside_prompts(mask), "old_logprobs": beside_prompts(old), "rewards": rewards}
    return {"start": start, "end": copy_of(model), "steps": [step, step], "losses": torch.tensor(losses)}


def test_two_steps_are_those_of_our_engine():
    run = two_steps()
    same_training(our_verl_steps(run["start"], run["steps"]), run["start"], run["end"], run["losses"])


if __name__ == "__main__":
    save("recorded_verl", **two_steps(), metadata={"verl": version("verl"), "torch": torch.__version__})
