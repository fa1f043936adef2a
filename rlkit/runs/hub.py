"""Uploads an exported model to the Hugging Face hub (`--push_to_hub`)."""

from __future__ import annotations

import os
import sys
from typing import Any

from rlkit.data.lookup import one_line
from rlkit.runs.directory import decided_by_rank_0
from rlkit.runs.rollouts import is_replay
from rlkit.tracking import Run


def check_hub(cfg: Any) -> None:
    """Before training, check that `cfg.push_to_hub` can be written to, and complete its name to OWNER/NAME.

    All ranks call this together, and rank 0 asks the hub.

    Raises:
        ValueError: see `open_repository`.
    """
    if name := "" if is_replay() else getattr(cfg, "push_to_hub", ""):
        cfg.push_to_hub = decided_by_rank_0(lambda: open_repository(name, private=cfg.hub_private_repo))


def open_repository(name: str, *, private: bool) -> str:
    """Create a model repository on the hub unless it exists, and check that the token may write to it.

    Args:
        name: NAME or OWNER/NAME. Without OWNER, the repository is that of the token's user.
        private: whether a new repository is private. An existing one stays as it is.

    Returns:
        OWNER/NAME.

    Raises:
        ValueError: the name is not valid, there is no token, the hub cannot be reached, or it refuses.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"push_to_hub: expected NAME or OWNER/NAME, got {name!r}") from error
    if not get_token():
        raise ValueError(
            "push_to_hub: expected a token of the Hugging Face hub, got none; use `hf auth login` or set HF_TOKEN"
        )
    api = HfApi()
    try:
        api.whoami()
        repository = api.create_repo(name, private=private or None, exist_ok=True).repo_id
        api.auth_check(repository, write=True)
    except Exception as error:  # of the network, the hub or its client
        raise ValueError(
            f"push_to_hub: expected the right to write to {name!r} at {api.endpoint}, got {one_line(error)}"
        ) from error
    return repository


def push_model(cfg: Any, run: Run) -> None:
    """Upload a run's exported model to `cfg.push_to_hub`, and its adapters to the folder `adapter` of the repository.

    With `cfg.keep_best` the best model is uploaded, and no adapters, because those are of the last step. If `best` has
    no model, that of the last step is uploaded, and a line says so.

    The run ends with an error message if that fails. All files of the run stay.
    """
    from huggingface_hub import HfApi

    api, repository = HfApi(), cfg.push_to_hub
    folder = pushed_folder(cfg, run)
    model, adapter = run.out / folder, run.out / "adapter"
    if getattr(cfg, "keep_best", False) and folder == "model":
        run.print("push_to_hub: best/ has no model, so the model of the last step is uploaded")
    run.print(f"uploading {model} to {api.endpoint}/{repository}")
    message = f"{run.name}, {run.step + 1} steps"
    try:
        api.upload_folder(repo_id=repository, folder_path=model, commit_message=message)
        if folder == "model" and adapter.exists():
            api.upload_folder(repo_id=repository, folder_path=adapter, path_in_repo="adapter", commit_message=message)
    except Exception as error:  # of the network, the hub or its client
        run.stop(
            f"push_to_hub: {one_line(error)}; the model is complete in {model}: upload it with "
            f"`hf upload {repository} {model} .`"
        )
    run.print(f"uploaded to {api.endpoint}/{repository}")


def pushed_folder(cfg: Any, run: Run) -> str:
    """The folder of the model that is uploaded: the best one if `best` has it, else that of the last step."""
    return "best" if getattr(cfg, "keep_best", False) and (run.out / "best").exists() else "model"


def command_line() -> list[str]:
    """The command that started this run, with torchrun's number of processes."""
    ranks, local = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    nodes = [f"--nnodes={ranks // local}"] if ranks > local else []
    return ["torchrun", *nodes, f"--nproc-per-node={local}", *sys.argv]
