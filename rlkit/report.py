"""Pictures of a run: the learning curves as a PNG, and one self-contained HTML page with curves, images and answers."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.tracking import CONFIG, EVAL, METRICS, read_metrics, read_object

CURVES = (
    ("reward/mean", "reward"),
    ("preference/accuracy", "pairs told apart"),
    ("loss", "loss"),
    ("entropy", "entropy"),
    ("kl", "KL to the reference"),
    ("grad_norm", "gradient norm"),
    ("ratio/clip_fraction", "share of clipped tokens"),
    ("mismatch/abs_dlogp", "sampler against trainer, mean |dlogp|"),
    ("tokens", "tokens a step"),
    ("time/tokens_per_second", "tokens a second"),
    ("time/mfu", "share of the GPUs' peak in training"),
)
LARGEST = 1e100  # what is larger is not drawn: axes overflow
PART = "reward_part/"  # of rlkit.rewards.part_means: a curve for each


def write_report(out: str | Path, samples: Sequence[Any] = (), *, title: str = "") -> Path:
    """Write `learning_curve.png` (the reward, or the first curve that the run has) and `report.html` from its files.

    No sample and no line of a log can prevent it: what cannot be drawn is left out, and what is no text is escaped.

    Args:
        out: a run's directory.
        samples: rlkit.data.Sample with text, row, reward and images; shown in a table.
        title: of the page; the directory's name by default.

    Returns:
        The page's path.
    """
    out = Path(out)
    rows = read_metrics(out / METRICS)
    evaluation = read_object(out / EVAL)
    tasks = {name: found for name, found in _object(evaluation.get("tasks")).items() if isinstance(found, dict)}
    parts = sorted({name for row in rows for name in row if name.startswith(PART)})
    known = (CURVES[0], *((name, f"reward, its part {name.removeprefix(PART)}") for name in parts), *CURVES[1:])
    curves = [curve for curve in known if any(_number(row.get(curve[0])) for row in rows)] or CURVES[:1]
    (out / "learning_curve.png").write_bytes(_plot(rows, curves[:1], evaluation))
    page = _template().render(
        title=title or out.name,
        evaluation=evaluation,
        measured={_label(name): x for name, x in evaluation.items() if _is_measurement(name, x)},
        tasks=tasks,
        columns=list(dict.fromkeys(name for found in tasks.values() for name in found)),
        metrics=_first_and_last(rows),
        config=read_object(out / CONFIG),
        last=rows[-1] if rows else {},
        curves=base64.b64encode(_plot(rows, curves, {})).decode(),
        samples=[_sample(sample) for sample in samples],
    )
    (out / "report.html").write_bytes(page.encode("utf-8", "backslashreplace"))  # an answer may hold half a character
    return out / "report.html"


def _is_measurement(name: str, x: Any) -> bool:
    return _number(x) and name not in ("heldout", "heldout_skipped", "steps")


def _label(name: str) -> str:
    """ "held-out loss before" for `heldout_loss_before`."""
    words = name.removeprefix("heldout_").replace("_", " ")
    return f"held-out {words}"


def _first_and_last(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float]]:
    """(name, value in the first row that has it, value in the last one) of every metric."""
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        for name, x in row.items():
            if name != "step" and _number(x):
                found[name] = (found.get(name, (x,))[0], x)
    return [(name, *found[name]) for name in sorted(found)]


def _object(x: Any) -> dict[str, Any]:
    return x if isinstance(x, dict) else {}


def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["figure"] = _figure
    return environment.from_string(Path(__file__).with_name("report.html").read_text())


def _sample(sample: Any) -> dict[str, Any]:
    return {
        "images": [_data_url(image) for image in sample.images],
        "question": sample.row.get("question", ""),
        "expected": sample.row.get("answer", ""),
        "text": sample.text,
        "reward": _figure(sample.reward, "g"),
        "right": _number(sample.reward) and sample.reward > 0,
        "finish_reason": sample.finish_reason,
    }


def _data_url(image: Any, side: int = 160) -> str:
    """A small copy of an image; an empty link where there can be none."""
    buffer = io.BytesIO()
    try:
        small = image.copy()
        small.thumbnail((side, side))
        small.convert("RGB").save(buffer, "PNG")
    except Exception:  # whatever is wrong with it, the page is worth more than the image
        return "data:image/png;base64,"
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _plot(rows: Sequence[Mapping[str, Any]], curves: Sequence[tuple[str, str]], evaluation: Mapping[str, Any]) -> bytes:
    from matplotlib.figure import Figure

    columns = min(2, len(curves))
    lines = -(-len(curves) // columns)
    figure = Figure(figsize=(6.4 * columns, (3.6 if columns == 1 else 2.4) * lines), layout="constrained")
    every = figure.subplots(lines, columns, squeeze=False).flat
    for axes in every[len(curves) :]:
        axes.remove()
    for axes, (name, label) in zip(every, curves, strict=False):
        points = [(row["step"], row[name]) for row in rows if _number(row.get(name))]
        axes.set_title(label.encode("utf-8", "backslashreplace").decode(), fontsize=10, parse_math=False)
        axes.set_xlabel("step", fontsize=8)
        axes.grid(alpha=0.3)
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, linewidth=0.8, alpha=0.45)
            axes.plot(steps, _smooth(values), linewidth=1.6)
    for name, style in (("accuracy_before", ":"), ("accuracy_after", "--")):
        if _number(evaluation.get(name)):
            label = f"held out, {name.removeprefix('accuracy_')}: {evaluation[name]:.3f}"
            figure.axes[0].axhline(evaluation[name], linestyle=style, color="black", linewidth=1, label=label)
            figure.axes[0].legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


def _figure(value: Any, form: str) -> str:
    """A number in this form, nan and infinities among them; anything else as text."""
    return format(value, form) if isinstance(value, float) or _number(value) else str(value)


def _smooth(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smooth, total, mass = [], 0.0, 0.0
    for value in values:
        total, mass = weight * total + (1 - weight) * value, weight * mass + (1 - weight)
        smooth.append(total / mass)
    return smooth
