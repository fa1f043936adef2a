"""The blocks of docs/other_trainers.md for OpenRLHF and AReaL, in these trainers as released; `make peers` runs it.

Of OpenRLHF, its training step and its advantages run, without Ray and DeepSpeed. Of AReaL, its FSDP engine trains two
steps on the CPU. RELEASED is the folder with the unpacked wheels. What they import and do not use here is absent, and
empty modules are in its place.
"""

import os
import runpy
import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from pages import blocks  # noqa: E402
from two_steps import LR, WORDS, adamw, batch_of, copy_of, engine_steps, same_training, tiny_model  # noqa: E402

from rlkit.advantages import rloo_advantages  # noqa: E402
from rlkit.losses import cispo_loss, token_mean  # noqa: E402
from rlkit.vlm.tiny import tiny_text_tokenizer  # noqa: E402

RELEASED = Path(os.environ.get("RELEASED", f"{sys.prefix}/released"))
SECTION = "OpenRLHF, NeMo-RL, AReaL"
ABSENT = {
    "openrlhf": "deepspeed flash_attn vllm",
    "areal": "tenacity flask uvloop numba aiofiles openai swanlab trackio tensorboardX tabulate pybase64",
}


class Empty:
    """Finds some packages and their modules, which have any name that is asked for."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.names else None

    def create_module(self, spec):
        return type("EmptyModule", (ModuleType,), {"__getattr__": lambda module, name: MagicMock(name=name)})(spec.name)

    def exec_module(self, module):
        pass


@contextmanager
def released(package, folder):
    """Inside, a trainer can be imported; afterwards, the empty modules are gone, as others would take them for real."""
    absent = ABSENT[package].split()
    finder = Empty([name for name in absent if name not in sys.modules])
    sys.path.insert(0, str(folder))
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] in finder.names]:
            del sys.modules[name]


def rows(seed):
    """Two responses to each of four prompts: prompts of 3 tokens, responses of 4 or 6."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([7, 9, 9, 7, 9, 9, 7, 9])
    mask = (torch.arange(9) >= 3) & (torch.arange(9) < lengths[:, None])
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 0.0, 1.0])
    tokens = torch.randint(2, WORDS, mask.shape, generator=g)
    old_logprobs = -3.4 + 0.3 * torch.randn(mask.shape, generator=g)
    return {"tokens": tokens, "lengths": lengths, "mask": mask, "old_logprobs": old_logprobs, "rewards": rewards}


def attended(step):
    return torch.arange(9) < step["lengths"][:, None]


def our_steps(start, steps, clip):
    groups = torch.arange(8) // 2
    batches = [batch_of(step).add(advantages=rloo_advantages(step["rewards"], groups)) for step in steps]

    def loss_fn(out, mb):
        loss = cispo_loss(out.logprobs, mb.old_logprobs, mb.advantages, mb.mask, *clip)
        return token_mean(loss, mb.mask, mb.total_tokens), {}

    return engine_steps(start, batches, loss_fn)


@pytest.fixture(scope="module")
def openrlhf():
    with released("openrlhf", next(RELEASED.glob("openrlhf-*.data")) / "purelib"):
        names = {"__name__": "train_ppo"}
        exec(blocks(SECTION)[0], names)
    return SimpleNamespace(**names)  # from here on, it finds that flash-attn is absent


def openrlhf_args(**advantage):
    advantage = {"estimator": "reinforce", "gamma": 1.0, "no_std_norm": True, "is_correction_level": "off"} | advantage
    correction = {"is_correction_mode": "mask", "is_correction_gating": "ratio", "is_correction_threshold": (0.5, 5.0)}
    return SimpleNamespace(
        actor=SimpleNamespace(
            eps_clip_low_high=(0.01, 0.02),
            dual_clip=None,
            loss_agg_mode="token-mean",
            policy_loss_type="ppo",
            aux_loss_coef=0.0,
            entropy_coef=None,
        ),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(**advantage, **correction), kl=SimpleNamespace(use_loss=False, init_coef=0.0)
        ),
        ds=SimpleNamespace(packing_samples=False),
        train=SimpleNamespace(max_epochs=1, dynamic_batch_enable=False, async_enable=False, colocate_all=True),
        rollout=SimpleNamespace(n_samples_per_prompt=2),
        reward=SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
        vllm=SimpleNamespace(),
    )


def plain_strategy(args):
    """What OpenRLHF's DeepSpeed strategy does for one process."""

    def optimizer_step(optimizer, model, scheduler, **_):
        optimizer.step()
        optimizer.zero_grad()

    return SimpleNamespace(
        args=args,
        ring_attn_group=None,
        backward=lambda loss, model, optimizer: loss.backward(),
        optimizer_step=optimizer_step,
        get_grad_norm=lambda model: 0.0,
    )


def experiences(openrlhf, step):
    """OpenRLHF's batches of a step: three of the responses, in another order, and the others."""
    from openrlhf.trainer.ppo_utils.experience import Experience

    found = []
    for index in ([5, 0, 2], [1, 3, 4, 6, 7]):
        actions = step["mask"][index, 3:]
        found.append(
            Experience(
                sequences=step["tokens"][index],
                attention_mask=attended(step)[index].long(),
                action_mask=actions,
                action_log_probs=step["old_logprobs"][index, 3:],
                rewards=step["rewards"][index],
                kl=torch.zeros(actions.shape),
                index=index,
            )
        )
    return found


def experience_maker(openrlhf, monkeypatch, args):
    """The one that the page's Trainer creates."""
    from openrlhf.trainer import ppo_trainer

    monkeypatch.setattr(ppo_trainer, "get_tokenizer", lambda *_, **__: None)
    monkeypatch.setattr(ppo_trainer, "prepare_datasets", lambda *_: (None, None, 1))
    monkeypatch.setattr(ppo_trainer, "RemoteExperienceMaker", ppo_trainer.RemoteExperienceMaker)
    args.eval, args.ckpt = SimpleNamespace(steps=-1), SimpleNamespace(save_steps=-1)
    args.data, args.algo.kl.target = SimpleNamespace(disable_fast_tokenizer=False), None
    args.logger = SimpleNamespace(wandb=SimpleNamespace(key=None), tensorboard_dir=None)
    trainer = openrlhf.Trainer.__ray_actor_class__("model", plain_strategy(args), *[None] * 5, temperature=1.0)
    return trainer.experience_maker


def test_openrlhfs_advantages(openrlhf, monkeypatch):
    """Those of rlkit, in OpenRLHF's order; they equal OpenRLHF's own RLOO."""
    step = rows(0)
    ours = experience_maker(openrlhf, monkeypatch, openrlhf_args())
    assert isinstance(ours, openrlhf.Rloo)
    own = openrlhf.RemoteExperienceMaker(
        *[None] * 4, ours.kl_ctl, plain_strategy(openrlhf_args(estimator="rloo")), None
    )
    expected = rloo_advantages(step["rewards"], torch.arange(8) // 2)
    made = zip(
        *(maker.compute_advantages_and_returns(experiences(openrlhf, step)) for maker in (ours, own)), strict=True
    )
    for found, theirs in made:
        torch.testing.assert_close(found.advantages, expected[found.index, None] * found.action_mask)
        torch.testing.assert_close(found.advantages, theirs.advantages * theirs.action_mask)
    assert expected.abs().max() > 0.5


def test_two_steps_in_openrlhfs_trainer(openrlhf, monkeypatch):
    from openrlhf.models import Actor
    from openrlhf.trainer.ray import ppo_actor

    monkeypatch.setattr(ppo_actor, "PolicyLoss", ppo_actor.PolicyLoss)
    monkeypatch.setattr(ppo_actor, "torch_dist_barrier_and_cuda_sync", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # for its replay buffer, which stays empty
    steps, args, model = [rows(0), rows(1)], openrlhf_args(), tiny_model()
    start = copy_of(model)
    strategy, optimizer = plain_strategy(args), adamw(model.parameters())

    policy = Actor(model)
    policy.packing_samples = False  # set where it loads a model by name

    def init(self, strategy, *_):  # the end of PolicyModelActor's, which loads the model onto a GPU
        scheduler = SimpleNamespace(get_last_lr=lambda: [LR])
        self.trainer = ppo_actor.ActorPPOTrainer(strategy, policy, None, optimizer, scheduler)

    monkeypatch.setattr(ppo_actor.PolicyModelActor.__ray_actor_class__, "init_model_from_pretrained", init)
    worker = object.__new__(openrlhf.Actor.__ray_actor_class__)
    worker.init_model_from_pretrained(strategy, "model", 2, None)
    losses = []
    for step in steps:
        parts = experience_maker(openrlhf, monkeypatch, args).compute_advantages_and_returns(
            experiences(openrlhf, step)
        )
        totals = {"dp_size": 1, "batch_num_tokens": int(step["mask"].sum()), "global_batch_size": 8}
        whole = type(parts[0]).concat_experiences(parts, 0)
        whole.info = {}
        status = worker.trainer.training_step(whole, 0.0, 0, totals)
        losses.append(status["metrics"]["policy_loss"])
        assert 0 < status["metrics"]["ppo_clip_ratio"] < 1
    found = our_steps(start, steps, (0.01, 0.02))
    same_training(found, start, copy_of(model), torch.stack(losses))


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_openrlhfs_own_loss_is_averaged_as_ours(openrlhf, aggregation):
    """On policy, PPO's clip and CISPO have one gradient."""
    step = rows(0)
    given = {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "token_level_loss": aggregation == "token-mean"}
    totals = {"dp_size": 2, "batch_num_tokens": 61.0, "global_batch_size": 16.0}
    gradients = []
    for loss in (openrlhf.Cispo(**given), openrlhf.PolicyLoss(**given)):
        logprobs = step["old_logprobs"].clone().requires_grad_()
        advantages = rloo_advantages(step["rewards"], torch.arange(8) // 2)[:, None] * step["mask"]
        loss(logprobs, step["old_logprobs"], advantages, action_mask=step["mask"], **totals)[0].backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda args: setattr(args.train, "async_enable", True), "Actor"),
        (lambda args: setattr(args.algo.kl, "init_coef", 0.01), "Trainer"),
    ],
)
def test_what_would_be_dropped_is_refused(openrlhf, change, where):
    args = openrlhf_args()
    change(args)
    with pytest.raises(AssertionError):
        if where == "Trainer":
            openrlhf.Trainer.__ray_actor_class__("model", plain_strategy(args))
        else:
            object.__new__(openrlhf.Actor.__ray_actor_class__).init_model_from_pretrained(plain_strategy(args))


def test_openrlhf_is_started_with_both_classes(openrlhf, monkeypatch):
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer.ray import ppo_actor

    monkeypatch.setattr(ppo_actor, "PolicyModelActor", ppo_actor.PolicyModelActor)
    monkeypatch.setattr(ppo_trainer, "PPOTrainer", ppo_trainer.PPOTrainer)
    started = []
    monkeypatch.setattr(runpy, "run_module", lambda name, run_name: started.append((name, run_name)))
    names = {"__name__": "__main__"}
    exec(blocks(SECTION)[0], names)
    assert started == [("openrlhf.cli.train_ppo_ray", "__main__")]
    assert (RELEASED / next(RELEASED.glob("openrlhf-*.data")) / "purelib/openrlhf/cli/train_ppo_ray.py").exists()
    assert ppo_actor.PolicyModelActor is names["Actor"] and ppo_trainer.PPOTrainer is names["Trainer"]


def test_two_steps_of_areal(tmp_path, monkeypatch):
    """AReaL's own engine, advantages and update, with two micro-batches a step."""
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in alone.items():
        monkeypatch.setenv(name, str(value))
    model = tiny_model()
    model.save_pretrained(tmp_path)
    tiny_text_tokenizer(["a b c"]).save_pretrained(tmp_path)
    start = copy_of(model)
    with released("areal", RELEASED):
        from areal.api import FinetuneSpec
        from areal.api.cli_args import MicroBatchSpec, NormConfig, OptimizerConfig, PPOActorConfig

        names = {"__name__": "my_actor"}
        exec(blocks(SECTION)[2], names)
        adam = {"lr": LR, "eps": 1e-4, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999}
        constant = {"lr_scheduler_type": "constant", "warmup_steps_proportion": 0.0, "gradient_clipping": 1e9}
        actor = names["Actor"](
            PPOActorConfig(
                experiment_name="a",
                trial_name="b",
                path=str(tmp_path),
                dtype="float32",
                attn_impl="sdpa",
                backend="fsdp:d1",
                optimizer=OptimizerConfig(**adam, **constant),
                reward_norm=NormConfig(group_size=2),
                adv_norm=None,
                kl_ctl=0.0,
                mb_spec=MicroBatchSpec(max_tokens_per_mb=9),
                ppo_n_minibatches=1,
            )
        )
        actor.create_process_group()
        actor.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=8))
        steps, losses = [rows(0), rows(1)], []
        train_batch = type(actor).__mro__[1].train_batch

        def seen(self, input_, loss_fn, loss_weight_fn):
            def kept(*given, **named):
                loss = loss_fn(*given, **named)
                losses[-1] += loss.item() * loss_weight_fn(given[2]).item() / int(steps[0]["mask"].sum())
                return loss

            losses.append(0.0)
            return train_batch(self, input_, kept, loss_weight_fn)

        monkeypatch.setattr(type(actor).__mro__[1], "train_batch", seen)
        for step in steps:
            trajectories = [
                {
                    "input_ids": step["tokens"][pair],
                    "attention_mask": attended(step)[pair],
                    "loss_mask": step["mask"][pair].int(),
                    "logprobs": step["old_logprobs"][pair],
                    "rewards": step["rewards"][pair],
                    "versions": torch.zeros(2, 9, dtype=torch.int),
                }
                for pair in (slice(i, i + 2) for i in range(0, 8, 2))
            ]
            actor.ppo_update(actor.compute_advantages(trajectories))
        end = {name: x.full_tensor().detach().clone() for name, x in actor.model.named_parameters()}
        actor.destroy()
    found = our_steps(start, steps, (0.2, 0.28))
    same_training(found, start, end, torch.tensor(losses))
