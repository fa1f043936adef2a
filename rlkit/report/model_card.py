"""The model card of an exported model: README.md, as the Hugging Face hub shows it, and the learning curve."""

from __future__ import annotations

import math
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.report.intervals import MEAN_SUFFIXES, NOT_MEASURED, intervals
from rlkit.tracking import CONFIG, EVAL, read_object

CARD, CURVE = "README.md", "learning_curve.png"
OF_THE_PLACE = {
    "config",
    "out",
    "resume",
    "allow_changes",
    "versions",
    "contents",
    "trackers",
    "push_to_hub",
    "hub_private_repo",
}
MOST_EVALUATIONS = 20  # rows of the table


def write_model_card(run: Path, folder: str, command: Sequence[str], version: str, *, repository: str = "") -> Path:
    """Write README.md and learning_curve.png into an exported model of a finished run.

    The card has the learning curve, the evaluations, the command, the options and versions. Absolute paths are cut to
    their last part, and addresses of servers are left out, because the card may be published.

    Args:
        run: the run's directory, with config.json, eval.json and learning_curve.png.
        folder: the folder of the model in it, such as "model".
        command: the arguments that started the run.
        version: version of rlkit.
        repository: name of the model on the hub; by default the card names the run.

    Returns:
        The card's path.
    """
    config, evaluation = read_object(run / CONFIG), read_object(run / EVAL)
    model = read_object(run / folder / "config.json")
    best = folder == "best"
    step = evaluation.get("best_step" if best else "steps")
    evaluations = [one for one in evaluation.get("evaluations") or [] if isinstance(one, dict) and "step" in one]

    parts = [_header(config, model, [one for one in evaluations if one["step"] == step])]
    parts += [f"# {repository or run.resolve().name}", _summary(config, step, best=best)]
    if (run / CURVE).exists():
        shutil.copyfile(run / CURVE, run / folder / CURVE)
        parts += [f"![learning curve]({CURVE})"]
    parts += ["## Evaluation", _evaluation_table(evaluations, step, evaluation.get("heldout"))]
    parts += ["## Use", _usage(model, repository or folder)]
    if not best and (run / "adapter").exists():
        parts += ["The LoRA adapters alone, for `peft` and vLLM, are in the folder `adapter`."]
    typed = shlex.join(_shareable(part) for part in command)
    parts += ["## Training", f"```bash\n{typed}\n```", _options(config, version)]
    card = run / folder / CARD
    part = card.with_name(f"{CARD}.part")
    part.write_bytes(("\n\n".join(parts) + "\n").encode("utf-8", "backslashreplace"))
    part.replace(card)
    return card


def _header(config: Mapping[str, Any], model: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """The YAML block that the hub reads: base model, data set, kind of model and held-out results."""
    from huggingface_hub import EvalResult, ModelCardData

    task, kind = str(config.get("task", "")), pipeline_tag(model)
    name = Path(task).name or "task"
    data_set = hub_id(task) or name
    measured = [
        EvalResult(kind, data_set, dataset_name=name, metric_type=metric, metric_value=round(x, 6))
        for one in results
        for metric, x in _means(one).items()
    ]
    data = ModelCardData(
        base_model=hub_id(str(config.get("model", ""))),
        datasets=[hub] if (hub := hub_id(task)) else None,
        library_name="rlkit" if is_value_model(model) and not is_classifier(model) else "transformers",
        pipeline_tag=kind,
        tags=["rlkit"],
        model_name=f"rlkit-{name}",
        eval_results=measured or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def hub_id(name: str) -> str | None:
    """The name of a model or data set if it is an id of the hub (OWNER/NAME), and no path on this machine."""
    return name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists() else None


def pipeline_tag(model: Mapping[str, Any]) -> str:
    """The hub's name of what a model does, from its config.json."""
    if is_value_model(model):
        return "text-classification"
    return "image-text-to-text" if "vision_config" in model else "text-generation"


def is_value_model(model: Mapping[str, Any]) -> bool:
    """Whether an exported model gives one number, as critics and reward models do, from its config.json."""
    return bool(model.get("value_head")) or is_classifier(model)


def is_classifier(model: Mapping[str, Any]) -> bool:
    """Whether transformers reads it with `AutoModelForSequenceClassification`."""
    return any("SequenceClassification" in name for name in model.get("architectures") or ())


def _summary(config: Mapping[str, Any], step: Any, *, best: bool) -> str:
    model, task = (_shareable(str(config.get(name, ""))) for name in ("model", "task"))
    which = " It had the best held-out result of the run." if best else ""
    return f"The model `{model}` after {step} steps of training on the task `{task}`.{which}"


def _means(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """The finite results of an evaluation, without standard errors and counts."""
    left_out = ("step", *NOT_MEASURED)
    return {
        name: x
        for name, x in evaluation.items()
        if isinstance(x, int | float) and math.isfinite(x) and name not in left_out and not name.endswith(MEAN_SUFFIXES)
    }


def _evaluation_table(evaluations: Sequence[Mapping[str, Any]], step: Any, rows: Any) -> str:
    """A line for each evaluation; the one of this model is bold."""
    if not evaluations:
        return "The run measured nothing on held-out rows."
    every = -(-len(evaluations) // MOST_EVALUATIONS)
    shown = [one for i, one in enumerate(evaluations) if i % every == 0 or one["step"] == step]
    names = [*dict.fromkeys(name for one in shown for name in _means(one))]
    lines = [["steps", *names], ["---"] * (len(names) + 1)]
    for one in shown:
        known = {name: f" ({low:.3f} to {high:.3f})" for name, (low, high) in intervals(one, rows).items()}
        means = _means(one)
        cells = [f"{means[name]:.3f}{known.get(name, '')}" if name in means else "" for name in names]
        cells = [str(one["step"]), *cells]
        lines.append([f"**{cell}**" if cell and one["step"] == step else cell for cell in cells])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"On {rows} held-out rows, with 95 % confidence intervals; this model is in bold.\n\n{table}"


def _usage(model: Mapping[str, Any], name: str) -> str:
    """Python code that loads the model, and the command that serves it."""
    kind = pipeline_tag(model)
    processor = "AutoProcessor" if "vision_config" in model else "AutoTokenizer"
    loader = {
        "image-text-to-text": "AutoModelForImageTextToText",
        "text-generation": "AutoModelForCausalLM",
        "text-classification": "AutoModelForSequenceClassification",
    }[kind]
    imports, load = [f"from transformers import {loader}, {processor}"], f"{loader}.from_pretrained"
    if is_value_model(model) and not is_classifier(model):  # transformers has no class for it
        imports = [f"from transformers import {processor}", "", "from rlkit.engines.value_head import load_value_model"]
        load = "load_value_model"
    code = [*imports, "", f'model = {load}("{name}")', f'processor = {processor}.from_pretrained("{name}")']
    text = "```python\n" + "\n".join(code) + "\n```"
    return text if is_value_model(model) else f"{text}\n\n```bash\nvllm serve {name}\n```"


def _options(config: Mapping[str, Any], version: str) -> str:
    """All options as YAML, which `--config` reads, and the versions of packages."""
    import yaml

    options = {name: _shareable(x) for name, x in config.items() if name not in OF_THE_PLACE}
    versions = {"rlkit": version, **(config.get("versions") or {})}
    versions.pop("rlkit-vlm", None)
    listed = ", ".join(f"{name} {x}" for name, x in versions.items())
    written = yaml.safe_dump(options, sort_keys=False, allow_unicode=True, width=1000)
    summary = "<summary>All options, as a file for <code>--config</code></summary>"
    return f"Versions: {listed}.\n\n<details>{summary}\n\n```yaml\n{written}```\n\n</details>"


def _shareable(x: Any) -> Any:
    """An option's value without what only concerns this machine: folders of absolute paths, and addresses."""
    if isinstance(x, str):
        x = re.sub(r"\b[a-z]+://\S+", "URL", x)
        return re.sub(r"(^|=)(?:/[^/=]+)*/([^/=]+)/?$", r"\1\2", x)
    if isinstance(x, list):
        return [_shareable(part) for part in x]
    return {name: _shareable(part) for name, part in x.items()} if isinstance(x, dict) else x
