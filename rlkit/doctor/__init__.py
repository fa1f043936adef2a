"""Checks before a run: this machine, a model, a task, servers, and a training step on a tiny model.

python -m rlkit.doctor                                               # the machine, and a training step
python -m rlkit.doctor --model DIR --task train.jsonl --reward boxed --servers http://host:8000
python -m rlkit.data check train.jsonl --reward boxed --model DIR    # only the data, in more detail
"""
