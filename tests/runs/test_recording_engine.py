"""The engine of a run with --save_rollouts stands for the engine itself."""

from types import SimpleNamespace

from rlkit.runs.rollouts import RecordingEngine


def test_what_a_recipe_sets_is_set_on_the_engine():
    engine = SimpleNamespace(optimizer="AdamW", temperature=1.0)
    recording = RecordingEngine(engine)
    recording.optimizer, recording.temperature = "SGD", 0.7
    recording.updates.append("an update")
    assert vars(engine) == {"optimizer": "SGD", "temperature": 0.7} and recording.optimizer == "SGD"
    recording.draws, recording.updates = ["a draw"], []
    assert not hasattr(engine, "draws") and recording.draws == ["a draw"]
