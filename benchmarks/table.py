"""A pytest-benchmark JSON as a Markdown table: `python benchmarks/table.py FILE.json FILE.md`.

`functions.md` is made of test_functions.py, `vlm.md` of test_vlm.py, `engines.md` of test_engines.py.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

COMMAND = "make bench-peers"
COLUMNS = ("rlkit", "loop", "verl", "trl")
SIZES = ("weights", "largest")


def milliseconds(x: float) -> str:
    return f"{x:.3f}" if x < 0.1 else f"{x:.2f}" if x < 10 else f"{x:.0f}"


def ratio(x: float) -> str:
    return f"{x:.1f}" if x < 100 else f"{x:.0f}"


def is_peer(name: str) -> bool:
    return name.split("_")[0] in ("verl", "trl")


def row(name: str, contestants: dict[str, dict]) -> str:
    ms = {who: 1000 * x["stats"]["min"] for who, x in contestants.items()}
    others = [f"{who.replace('_', ' ')} {milliseconds(t)}" for who, t in ms.items() if who not in COLUMNS]
    peers = [t for who, t in ms.items() if is_peer(who)]
    extra = {
        who.replace("_", " "): x["extra_info"]["peak_extra_bytes"] / 1e6
        for who, x in contestants.items()
        if "peak_extra_bytes" in x["extra_info"]
    }
    cells = [
        name,
        *(milliseconds(ms[who]) if who in ms else "" for who in COLUMNS),
        ", ".join(others),
        ratio(ms["verl"] / ms["rlkit"]) if "verl" in ms else "",
        ratio(min(peers) / ms["rlkit"]) if peers else "",
        f"{max(x['extra_info']['max_rel_diff'] for x in contestants.values()):.0e}",
        ", ".join(f"{who} {mb:.0f}" for who, mb in extra.items()),
    ]
    return "| " + " | ".join(cells) + " |"


def in_groups(results: dict) -> dict[str, dict[str, dict]]:
    groups: dict[str, dict[str, dict]] = defaultdict(dict)
    for benchmark in results["benchmarks"]:
        groups[benchmark["group"]][benchmark["extra_info"]["contestant"]] = benchmark
    return groups


def origin(results: dict, command: str) -> list[str]:
    """The machine, the versions, the day and the command."""
    machine, versions = results["machine_info"], results["benchmarks"][0]["extra_info"]["versions"]
    cpu = machine.get("cpu", {})
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    return [
        f"{cpu.get('count', '?')} cores of {cpu.get('brand_raw', machine.get('processor', '?'))} "
        f"({machine['system']} {machine['machine']}), {named}; {results['datetime'][:10]}. Command:",
        "",
        f"    {command}",
        "",
    ]


def vlm_table(results: dict) -> str:
    """rlkit and what it is compared with, and how many times as long each of those takes."""
    lines = ["| what | rlkit | others | other / rlkit | max difference |", "|---|---|---|---|---|"]
    for name, contestants in in_groups(results).items():
        ms = {who: 1000 * x["stats"]["min"] for who, x in contestants.items()}
        others = {who: t for who, t in ms.items() if who != "rlkit"}
        cells = [
            name,
            milliseconds(ms["rlkit"]),
            ", ".join(f"{who} {milliseconds(t)}" for who, t in others.items()),
            ", ".join(ratio(t / ms["rlkit"]) for t in others.values()),
            f"{max(x['extra_info']['max_rel_diff'] for x in contestants.values()):.0e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Milliseconds, the least of all rounds; one thread. Position ids: 32 x 4096 tokens, right-padded, with 192",
        "images of 324 tokens each; vLLM's function is called row by row. Unpad and repad: float32, half of the",
        "tokens padding; `another` is a further tensor of the same rows. `flash_attn` is what its `bert_padding`",
        "computes, written down in the benchmark; `transformers` is transformers' own for packages without one. `copy`",
        "copies the result, which is the bound: of rows of 128 numbers memory is nearly all that it costs. The",
        "training step: a Qwen2 of 4 layers of 256, 16 rows of 16 to 496 tokens, forward, backward and AdamW, with the",
        "gradient norm compared.",
        "",
    ]
    command = (
        "OMP_NUM_THREADS=1 pytest benchmarks/test_vlm.py --benchmark-enable --benchmark-json=FILE.json\n"
        "    python benchmarks/table.py FILE.json benchmarks/results/vlm.md"
    )
    return "\n".join(lines + origin(results, command))


def engines_table(results: dict) -> str:
    """Steps beside a bare loop; memory and time of weights and checkpoints; a VLM on a GPU, if there was one."""
    groups: dict[str, list[dict]] = defaultdict(list)
    for benchmark in results["benchmarks"]:
        groups[benchmark["group"]].append({**benchmark["extra_info"], "ms": 1000 * benchmark["stats"]["min"]})
    lines = ["| step | tokens | bare loop | engine | engine / bare loop | difference |", "|---|---|---|---|---|---|"]
    for x in groups["overhead"]:
        bare = milliseconds(1000 * x["bare"])
        lines.append(
            f"| {x['name']} | {x['tokens']} | {bare} | {milliseconds(x['ms'])} | {x['ratio']:.3f} | "
            f"{x['difference']:.0e} |"
        )
    lines += [
        "",
        "Milliseconds, the least of all rounds; the ratio is the median over rounds, in each of which the two take",
        "turns. A Qwen2 of 4 layers of 256, float32, rows of unequal length; forward, backward, clipping and AdamW.",
        "The bare loop is given packed inputs that are laid out already, and the same attention. The difference is",
        "that of the loss or of the gradient norm, whichever is larger, as a share.",
        "",
        "| what | ranks | seconds | extra MB a rank | / weights | / largest tensor |",
        "|---|---|---|---|---|---|",
    ]
    for x in groups["weights and checkpoints"]:
        for name, row in x["rows"].items():
            mb, time = row["extra_mb"], f"{row['seconds']:.2f}"
            shares = [f"{mb:.0f}", *(f"{mb / x[key]:.2f}" for key in SIZES)]
            lines.append(f"| {' | '.join([name, str(x['world']), time, *shares])} |")
    weights, largest = (groups["weights and checkpoints"][0][key] for key in SIZES)
    lines += [
        "",
        f"Weights of {weights:.0f} MB in all, the largest tensor {largest:.0f} MB, float32; a checkpoint holds them",
        "and AdamW's two moments, three times as much. The least of three; files are read from the page cache. Extra",
        "memory is what a rank's process held at the most beyond what it had before the call, by the kernel's count.",
        "",
    ]
    if groups["GPU"]:
        lines += ["| VLM of 2B | tokens / s | MFU | GB at most | gradient norm |", "|---|---|---|---|---|"]
        for x in groups["GPU"]:
            mfu = f"{x['mfu']:.1%}" if x["mfu"] else ""
            rate = f"{x['tokens_per_second']:.0f}"
            lines.append(f"| {x['name']} | {rate} | {mfu} | {x['peak_gb']:.0f} | {x['norm']:.4g} |")
        lines += ["", f"On {groups['GPU'][0]['device']}, bfloat16, activations recomputed.", ""]
    command = (
        "OMP_NUM_THREADS=1 pytest benchmarks/test_engines.py --benchmark-enable --benchmark-json=FILE.json\n"
        "    python benchmarks/table.py FILE.json benchmarks/results/engines.md"
    )
    return "\n".join(lines + origin(results, command))


def table(results: dict) -> str:
    groups = in_groups(results)
    heads = [*COLUMNS, "others", "verl / rlkit", "best peer / rlkit", "max difference", "extra MB"]
    lines = [
        f"| function | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
        *(row(name, contestants) for name, contestants in groups.items()),
        "",
        "Milliseconds, the least of all rounds; one thread; float32, 256 x 2048 in groups of 8 unless said. Rows of",
        "the mask have tool turns and right padding. Losses are forward, reduction and backward unless said; verl and",
        "TRL compute the metrics they log in the same call. The loop is plain Python over lists (over rows of logits,",
        "where there are logits). A peer is verl or TRL, in any variant. The difference is the largest of any",
        "contestant from rlkit, as a share of the output's largest value. Extra MB is what tensors took at the most",
        "beyond the inputs, results included, such as the 66 MB of the gradient by logits. Losses on preferences: 4096",
        "pairs, the mean and its gradient; TRL's are methods of its CPO, ORPO and reward trainers.",
        "",
        *origin(results, COMMAND),
    ]
    return "\n".join(lines)


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    make = {"vlm": vlm_table, "engines": engines_table}.get(target.stem, table)
    target.write_text(make(json.loads(source.read_text())))


if __name__ == "__main__":
    main()
