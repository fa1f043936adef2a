"""The files of docs/jobs parse, name options that exist, and do what docs/jobs.md says.

The stand-ins for srun, ssh, curl and python write down how they were called. Nothing runs on a real cluster here.
"""

import configparser
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser
from waiting import until

from rlkit import runs
from rlkit.runs import checkpoints
from rlkit.tracking import Run

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "docs" / "jobs"
sys.path.insert(0, str(ROOT / "tests" / "recipes"))
import helpers  # noqa: E402

LOG = 'printf "%s\\n" "$(basename "$0")" "$@" > "$LOG/$(date +%s%N).$$"'
STAND_INS = {
    # what trains notes that it was told to end, and ends; what serves lives until the script ends
    "python": f"""{LOG}
case "$*" in
    "-c "*) echo a-token;;
    *rlkit.rollout.serve*) touch "$LOG/serves"; exec sleep 1000;;
    *) if [ -n "${{WAITS-}}" ]; then
        trap 'touch "$LOG/told"; exit 0' TERM; echo $$ >> "$LOG/training"
        for _ in $(seq 2000); do sleep 0.05; done
    fi; exit "${{TRAINS_WITH-0}}";;
esac""",
    "srun": f"""{LOG}
while [ "$1" != python ]; do shift; done
exec "$@\"""",
    "scancel": f'{LOG}\nkill -TERM "$(cat "$LOG/training")"',
    "scontrol": f"""case "$1" in show) printf '%s\\n' $NODES;; *) {LOG};; esac""",
    "getent": 'echo "10.0.0.${2#node} STREAM $2"',
    "curl": f'until [ -e "$LOG/serves" ]; do sleep 0.05; done; {LOG}',
    "ssh": 'shift\nexec bash -c "$1"',
}


@pytest.fixture
def cluster(tmp_path):
    """A checkout with stand-ins; called with a command, it starts it, and `calls` reads what was called."""
    bin_, log = tmp_path / ".venv" / "bin", tmp_path / "log"
    bin_.mkdir(parents=True)
    log.mkdir()
    for name, text in STAND_INS.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin_ / name).chmod(0o755)
    (bin_ / "activate").write_text("")
    environment = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "LOG": str(log), "SLURM_JOB_ID": "7"}
    started = []

    def start(*command, **variables):
        process = subprocess.Popen(
            command, cwd=tmp_path, env={**environment, **variables}, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        started.append(process)
        return process

    def calls(name):
        files = sorted(path for path in log.iterdir() if re.fullmatch(r"\d+\.\d+", path.name))
        return [rest for first, *rest in (path.read_text().splitlines() for path in files) if first == name]

    start.calls, start.log, start.folder = calls, log, tmp_path
    yield start
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def check_training(arguments):
    """A call of `python -m rlkit.runs.torchrun`: torchrun's parser and the recipe's take it. Returns both results."""
    assert arguments[:2] == ["-m", "rlkit.runs.torchrun"]
    own = get_args_parser().parse_args(arguments[2:])
    module = helpers.load(Path(own.training_script).stem)
    assert (ROOT / own.training_script).exists() and own.shutdown_timeout == 600
    return own, runs.parse_options(module.Config, module.__doc__, own.training_script_args)


# --- SLURM


def slurm(name, nodes):
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", (JOBS / name).read_text(), re.M)
    assert dict(lines)["nodes"] == str(len(nodes.split())) and {"requeue", "signal", "time"} <= set(dict(lines))
    variables = {"NODES": nodes, "SLURM_JOB_NODELIST": "list", "SLURM_JOB_NAME": dict(lines)["job-name"]}
    return variables | {"SLURM_NNODES": dict(lines)["nodes"]}


def test_slurm(cluster):
    job = cluster("bash", JOBS / "slurm.sbatch", **slurm("slurm.sbatch", "node1 node2"))
    assert job.wait(100) == 0, job.stdout.read()
    (call,) = cluster.calls("python")
    own, options = check_training(call)
    assert (own.nnodes, own.nproc_per_node, own.rdzv_endpoint) == ("2", "8", "node1:29500")
    assert options.resume and options.out == "runs/grpo" and options.rollout == "vllm"
    assert cluster.calls("scontrol") == []  # a run that has ended is not queued again


def test_slurm_with_servers(cluster):
    job = cluster("bash", JOBS / "slurm_servers.sbatch", **slurm("slurm_servers.sbatch", "node1 node2 node3"))
    assert job.wait(100) == 0, job.stdout.read()
    token, serve, call = cluster.calls("python")
    own, options = check_training(call)
    assert (own.nnodes, own.rdzv_endpoint) == ("2", "node1:29500") and options.resume
    assert options.servers == tuple(f"http://10.0.0.3:{port}" for port in range(8000, 8008))
    assert [address[-1].removesuffix("/health") for address in cluster.calls("curl")] == list(options.servers)
    assert serve == [
        *("-m", "rlkit.rollout.serve", "--model", options.model, "--count", "8", "--host", "10.0.0.3"),
    ]  # fmt: skip
    source = (ROOT / "rlkit" / "rollout" / "serve.py").read_text()
    assert all(f'"{option}"' in source for option in serve if option.startswith("--"))
    of_serve, of_training = cluster.calls("srun")
    assert "--nodelist=node3" in of_serve and "--nodelist=node1,node2" in of_training


@pytest.mark.parametrize(
    ("name", "nodes", "step"),
    [("slurm.sbatch", "node1 node2", "7.0"), ("slurm_servers.sbatch", "node1 node2 node3", "7.1")],
)
def test_slurm_before_the_time_limit(cluster, name, nodes, step):
    """The training is told to save, and is waited for, before the job is queued again."""
    job = cluster("bash", JOBS / name, WAITS="yes", **slurm(name, nodes))
    until(lambda: (cluster.log / "training").exists())
    job.terminate()
    assert job.wait(100) == 0, job.stdout.read()
    assert (cluster.log / "told").exists()
    assert cluster.calls("scancel") == [["--signal=TERM", step]] and cluster.calls("scontrol") == [["requeue", "7"]]


def test_slurm_keeps_the_exit_code_of_a_run_that_fails(cluster):
    job = cluster("bash", JOBS / "slurm.sbatch", TRAINS_WITH="3", **slurm("slurm.sbatch", "node1 node2"))
    assert job.wait(100) == 3 and cluster.calls("scontrol") == []


# --- ssh


def test_ssh(cluster):
    options = ["recipes/grpo_vlm.py", "--prompt_template", "{question} It's 'one' word.", "--out", "runs/a", "--resume"]
    job = cluster("bash", JOBS / "ssh_nodes.sh", "node1 node2", *options, GPUS="4")
    assert job.wait(100) == 0, job.stdout.read()
    found = [check_training(call) for call in cluster.calls("python")]
    assert sorted(own.node_rank for own, _ in found) == [0, 1]
    for own, recipe in found:
        assert (own.nnodes, own.nproc_per_node, own.master_addr) == ("2", "4", "node1")
        assert recipe.prompt_template == "{question} It's 'one' word."
    assert list(cluster.folder.glob(".ssh_nodes*")) == []


def test_ssh_ctrl_c_saves_on_all_machines(cluster):
    job = cluster("bash", JOBS / "ssh_nodes.sh", "node1 node2", "recipes/grpo_vlm.py", WAITS="yes")
    started = cluster.log / "training"
    until(lambda: started.exists() and len(started.read_text().split()) == 2)
    job.send_signal(signal.SIGINT)
    assert job.wait(100) == 0, job.stdout.read()
    assert (cluster.log / "told").exists()


def test_ssh_has_the_exit_code_of_a_machine_that_fails(cluster):
    assert cluster("bash", JOBS / "ssh_nodes.sh", "node1 node2", "recipes/grpo_vlm.py", TRAINS_WITH="5").wait(100) == 5


# --- Kubernetes and SkyPilot


@pytest.mark.parametrize(("evaluation", "trains_with", "code"), [(None, 0, 75), ({"steps": 9}, 0, 0), (None, 4, 4)])
def test_a_job_is_finished_when_its_run_is(cluster, evaluation, trains_with, code):
    if evaluation:
        (cluster.folder / "run").mkdir()
        (cluster.folder / "run" / "eval.json").write_text(json.dumps(evaluation))
    script = cluster("bash", JOBS / "finished_or_fail.sh", "run", "python", "train", TRAINS_WITH=str(trains_with))
    assert script.wait(100) == code, script.stdout.read()


def test_a_preempted_job_saves_and_has_steps_left(cluster):
    script = cluster("bash", JOBS / "finished_or_fail.sh", "run", "python", "train", WAITS="yes")
    until(lambda: (cluster.log / "training").exists())
    script.terminate()
    assert script.wait(100) == 75 and (cluster.log / "told").exists()


def test_a_run_is_finished_when_its_model_is_exported(tmp_path, monkeypatch):
    """What `finished_or_fail.sh` looks for is not there while the model is exported, and is there afterwards."""
    script, seen = ["bash", str(JOBS / "finished_or_fail.sh"), str(tmp_path), "true"], []

    def says(*_):
        seen.append(subprocess.run(script, stderr=subprocess.DEVNULL).returncode)

    monkeypatch.setattr(checkpoints, "export_model", says)
    monkeypatch.setattr(checkpoints, "keep_best_of_all", says)
    run = Run(tmp_path, {}, name="run")
    run.log_evaluation(accuracy_before=0.1, evaluations=[{"step": 3, "accuracy": 0.2}])
    run.log(0, {"reward/mean": 0.5})
    runs.finish(None, run, [], model=object())
    says()
    assert seen == [75, 75, 0]


def test_kubernetes():
    service, job = yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text())
    assert (service["apiVersion"], service["kind"], job["apiVersion"], job["kind"]) == (
        "v1",
        "Service",
        "batch/v1",
        "Job",
    )
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert pod["restartPolicy"] == "Never"  # Kubernetes wants it with a podFailurePolicy
    assert pod["subdomain"] == service["metadata"]["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    shell, script, out, python, *command = container["command"]
    assert shell == "bash" and (ROOT / script).exists() and python == "python"
    own, options = check_training([*command, *(x.replace("$(JOB_COMPLETION_INDEX)", "1") for x in container["args"])])
    assert own.nnodes == str(spec["completions"]) and own.node_rank == 1 and own.master_addr == f"{name}-0.{name}"
    assert int(own.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert options.resume and options.out == out
    assert own.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    ignored = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
    assert ignored[1]["onExitCodes"]["values"] == [75]


def test_skypilot(cluster):
    task = yaml.safe_load((JOBS / "skypilot.yaml").read_text())
    assert set(task) == {"name", "resources", "num_nodes", "workdir", "file_mounts", "setup", "run"}
    subprocess.run(["bash", "-n"], input=task["setup"], text=True, check=True)
    (cluster.folder / "docs").symlink_to(ROOT / "docs")
    variables = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    job = cluster("bash", "-c", task["run"], SKYPILOT_NUM_GPUS_PER_NODE="8", **variables)
    assert job.wait(100) == 75, job.stdout.read()  # the stand-in trains nothing
    own, options = check_training(cluster.calls("python")[0])
    assert (own.nnodes, own.node_rank, own.nproc_per_node, own.master_addr) == (
        str(task["num_nodes"]),
        1,
        "8",
        "10.0.0.1",
    )
    assert options.resume and f"/{options.out.split('/')[1]}" in task["file_mounts"]


# --- the image, and the scripts as text


def test_dockerfile():
    """Its instructions are known, its commands parse, the files that it copies and the extras that it names exist."""
    text = re.sub(r"^#.*\n", "", (JOBS / "Dockerfile").read_text(), flags=re.M).replace("\\\n", "")
    instructions = [line.split(" ", 1) for line in text.splitlines() if line]
    assert instructions[0][0] == "FROM"
    for name, rest in instructions:
        assert name in ("FROM", "ENV", "RUN", "WORKDIR", "COPY", "CMD"), name
        if name == "RUN":
            subprocess.run(["bash", "-n"], input=rest, text=True, check=True)
        if name == "COPY":
            assert all((ROOT / source).exists() for source in shlex.split(rest)[:-1]), rest
        if name == "CMD":
            assert json.loads(rest)[:2] == ["python", "-m"]
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    copied = " ".join(rest for name, rest in instructions if name == "COPY")
    assert all(file in copied for file in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"))
    for path in (JOBS / "Dockerfile", JOBS / "skypilot.yaml"):
        (extras,) = re.findall(r"pip install -e '\.\[([\w,-]+)\]'", path.read_text())
        assert set(extras.split(",")) <= set(config["options.extras_require"])


@pytest.mark.parametrize("path", sorted([*JOBS.glob("*.sh"), *JOBS.glob("*.sbatch")]), ids=lambda path: path.name)
def test_scripts_parse(path):
    subprocess.run(["bash", "-n", path], check=True)


def test_the_page_names_every_file():
    page = (ROOT / "docs" / "jobs.md").read_text()
    assert all(f"jobs/{path.name}" in page for path in JOBS.iterdir())
