"""verl's own command, two steps of a tiny model on two Ray workers; `make peers` runs it.

The commands are those of docs/other_trainers.md. verl_on_cpu.py is what they lack on a machine without a GPU: a
platform, and a server that samples. Our engine then trains on what verl sampled, and the weights are compared.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parent))
from pages import PAGE, blocks  # noqa: E402
from two_steps import batch_of, copy_of, engine_steps, tiny_model  # noqa: E402

from rlkit.advantages import passk_advantages, rloo_advantages  # noqa: E402
from rlkit.losses import cispo_loss, token_mean, vespo_loss  # noqa: E402
from rlkit.vlm.tiny import tiny_text_tokenizer  # noqa: E402

HERE = Path(__file__).parent
PROMPTS, RESPONSES, EPOCHS = 4, 8, 2
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
MODE, ESTIMATOR = f"{ACTOR}.policy_loss.loss_mode", "algorithm.adv_estimator"
OPTIONS = {
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": 2,  # places for workers
    "+ray_kwargs.ray_init.num_gpus": 2,
    "ray_kwargs.ray_init.num_cpus": 32,
    "+ray_kwargs.ray_init.include_dashboard": False,
    "trainer.total_training_steps": 2,
    "trainer.logger": "[file]",
    "trainer.val_before_train": False,
    "data.train_batch_size": PROMPTS,
    "data.shuffle": False,
    "data.max_prompt_length": 40,
    "data.max_response_length": 6,
    "data.dataloader_num_workers": 0,
    f"{MODEL}.path": "model",
    f"{MODEL}.use_remove_padding": False,  # of flash-attn
    f"+{MODEL}.override_config.attn_implementation": "sdpa",
    f"{ACTOR}.strategy": "fsdp2",
    f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype": "fp32",
    f"{ACTOR}.fsdp_config.use_torch_compile": False,
    f"{ACTOR}.ppo_mini_batch_size": PROMPTS,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8,
    f"{ACTOR}.ppo_epochs": EPOCHS,
    f"{ACTOR}.clip_ratio_low": 0.01,
    f"{ACTOR}.clip_ratio_high": 0.02,
    f"{ACTOR}.optim.lr": 0.01,
    f"{ACTOR}.optim.weight_decay": 0,
    f"+{ACTOR}.optim.override_optimizer_config.eps": 1e-4,
    f"{ACTOR}.grad_clip": 1e9,
    f"{ACTOR}.optim.clip_grad": 1e9,
    f"{ROLLOUT}.name": "on_cpu",
    f"{ROLLOUT}.n": RESPONSES,
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8,
    f"{ROLLOUT}.calculate_log_probs": True,
    f"{ROLLOUT}.agent.num_workers": 1,
    "reward.num_workers": 1,
    "reward.custom_reward_function.path": HERE / "verl_on_cpu.py",
    "reward.custom_reward_function.name": "score",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
}
NO_ENTRY_POINT = {"VERL_USE_EXTERNAL_PLUGINS": "none"}

needs_a_queue = pytest.mark.skipif(find_spec("transfer_queue") is None, reason="verl's trainer needs TransferQueue")


def pages_command(number=0, **changed):
    """A command of the page with OPTIONS in the place of its dots."""
    words = shlex.split(blocks("verl", "bash")[number].replace("\\\n", " "))
    words = words[words.index("python") :]
    assert words[:4] == ["python", "-m", "verl.trainer.main_ppo", "..."]
    given = OPTIONS | dict(word.split("=") for word in words[4:]) | changed
    return [sys.executable, *words[1:3], *(f"{name}={value}" for name, value in given.items())]


def run(command, folder, **settings):
    """Run a command of verl's in a folder with a tiny model and eight prompts."""
    tokenizer = tiny_text_tokenizer(["a b c"])
    tokenizer.save_pretrained(folder / "model")
    tiny_model(len(tokenizer)).save_pretrained(folder / "model")
    rows = [
        {"data_source": "none", "prompt": [{"role": "user", "content": letter}], "reward_model": {"ground_truth": ""}}
        for letter in "abcdefgh"
    ]
    Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    files = [f"data.train_files={folder}/rows.parquet", f"data.val_files={folder}/rows.parquet"]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",  # Ray places no more workers than are named here
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # verl's FSDP engine is listed under the names of accelerators
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "VERL_ON_CPU_RECORDS": str(folder),
    }
    for _ in range(3):
        code, output = finished([*command, *files], folder, env | settings)
        if "The current node timed out during startup" not in output:  # Ray's 30 s, too few on a busy machine
            break
    return code, output


def finished(command, folder, env):
    """The exit status and output of a command; its whole process group is gone afterwards."""
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(timeout=1500)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return code, (folder / "output").read_text()


def steps_of(folder):
    """What verl sampled in each step, as batches of ours."""
    lines = [json.loads(line) for file in folder.glob("responses*.jsonl") for line in open(file)]
    tokenizer = tiny_text_tokenizer(["a b c"])
    for version in (0, 1):
        rows = sorted((row for row in lines if row["version"] == version), key=lambda row: row["prompt"])
        assert len(rows) == PROMPTS * RESPONSES and len({tuple(row["prompt"]) for row in rows}) == PROMPTS
        tokens = [torch.tensor(row["prompt"] + row["answer"]) for row in rows]
        masks = [torch.arange(len(x)) >= len(row["prompt"]) for x, row in zip(tokens, rows, strict=True)]
        logprobs = [torch.tensor([0.0] * len(row["prompt"]) + row["logprobs"]) for row in rows]
        texts = [tokenizer.decode(row["answer"], skip_special_tokens=True) for row in rows]
        yield {
            "tokens": padded(tokens),
            "mask": padded(masks),
            "old_logprobs": padded(logprobs),
            "lengths": torch.tensor([len(x) for x in tokens]),
            "rewards": torch.tensor([len(text) % 4 / 2 for text in texts]),
        }


def padded(tensors):
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def weights(folder, version):
    return torch.load(folder / f"weights{version}.pt")


def same_as_our_engine(folder, loss, advantages):
    """verl's weights after each step, and its metrics, are those of our engine on the same responses."""
    groups = torch.arange(PROMPTS * RESPONSES) // RESPONSES
    batches = [batch_of(step).add(advantages=advantages(step["rewards"], groups)) for step in steps_of(folder)]

    def loss_fn(out, mb):
        per_token = loss(out.logprobs, mb.old_logprobs, mb.advantages, mb.mask)
        return token_mean(per_token, mb.mask, mb.total_tokens), {}

    start, seen = weights(folder, 0), []
    names = set(copy_of(tiny_model(len(start["model.embed_tokens.weight"]))))
    start = {name: x for name, x in start.items() if name in names}
    for steps in (1, 2):
        losses, ours = engine_steps(start, [batch for batch in batches[:steps] for _ in range(EPOCHS)], loss_fn)
        verls = weights(folder, steps)
        assert max((ours[name] - start[name]).abs().max() for name in names) > 1e-3
        for name in names:
            torch.testing.assert_close(ours[name], verls[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        seen.append(losses[-EPOCHS:].mean().item())
    logged = [json.loads(line)["data"] for line in open(folder / "metrics.jsonl")]
    assert [step["actor/loss"] for step in logged] == pytest.approx(seen, rel=1e-3, abs=1e-6)
    assert all(step["training/rollout_probs_diff_max"] < 1e-5 for step in logged)
    return logged


@needs_a_queue
def test_the_pages_command(tmp_path):
    """rlkit is installed, two options change."""
    code, output = run(pages_command(), tmp_path)
    assert code == 0, output[-3000:]
    logged = same_as_our_engine(tmp_path, partial(cispo_loss, clip_low=0.01, clip_high=0.02), rloo_advantages)
    assert all(step["actor/pg_clipfrac"] > 0 for step in logged)


@needs_a_queue
def test_verls_own_loss_and_advantages(tmp_path):
    """The same command before the change, with verl's own CISPO and RLOO: equal formulas, equal weights."""
    code, output = run(pages_command(**{MODE: "cispo", ESTIMATOR: "rloo"}), tmp_path, **NO_ENTRY_POINT)
    assert code == 0, output[-3000:]
    same_as_our_engine(tmp_path, partial(cispo_loss, clip_low=0.01, clip_high=0.02), rloo_advantages)


@needs_a_queue
def test_the_pages_module(tmp_path):
    """Functions of one's own, in a module that the page's option names to the workers; the driver lacks it."""
    (tmp_path / "my_losses.py").write_text(blocks("verl")[0])
    (option,) = re.findall(r"`(\+ray_kwargs\.\S+)=my_losses`", PAGE)
    command = pages_command(1, **{option: "'verl_on_cpu,my_losses'"})
    code, output = run(command, tmp_path, **NO_ENTRY_POINT)
    assert code == 0, output[-3000:]
    same_as_our_engine(tmp_path, partial(vespo_loss, k_pos=3.0), partial(passk_advantages, k=4))


@needs_a_queue
def test_without_a_plug_in_the_worker_does_not_know_the_loss(tmp_path):
    command = pages_command(**{ESTIMATOR: "rloo"})
    code, output = run(command, tmp_path, **NO_ENTRY_POINT)
    assert code != 0 and "Unsupported loss mode: rlkit_cispo" in output and "WorkerDict" in output
