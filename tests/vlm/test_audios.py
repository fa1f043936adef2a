"""Audios of a row: samples and files, the sound that a model hears of them, and what is refused."""

import base64
import io
import json
import struct
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import family_processors

from rlkit.data import append_observation, load_task
from rlkit.data.media import Audio
from rlkit.data.samples import check_sample
from rlkit.doctor.task import check_rows, show_rows
from rlkit.engines import make_engine
from rlkit.rollout.vllm_requests import vllm_prompt
from rlkit.vlm import encode_prompt, load_audio, load_model, load_processor
from rlkit.vlm.inputs import concatenate_vision
from rlkit.vlm.loading import load_config
from rlkit.vlm.processors import placeholder_id

OMNI = ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"]
HEARS = [*OMNI, "gemma3n", "gemma4", "gemma4_unified"]


@pytest.fixture(scope="module")
def av():
    return pytest.importorskip("av", reason="needs PyAV, of the extra audio")


def tone(seconds=0.5, rate=16000, pitch=440.0):
    return 0.5 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)


def wav(samples, rate=16000):
    """A file with these samples [samples] or [channels, samples]."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((np.atleast_2d(samples).shape[0], 2, rate, 0, "NONE", ""))
        out.writeframes((np.atleast_2d(samples).T * 32767).astype("<i2").tobytes())
    return file.getvalue()


def float_wav(samples, rate=16000):
    """A file with these samples as 32-bit floats."""
    data = np.asarray(samples, "<f4").tobytes()
    form = struct.pack("<IHHIIHH", 16, 3, 1, rate, 4 * rate, 4, 32)
    return b"RIFF%sWAVEfmt %sdata%s" % (struct.pack("<I", 36 + len(data)), form, struct.pack("<I", len(data))) + data


def loudest(samples, rate=16000):
    """The frequency of the largest part of a sound, in Hz."""
    return np.abs(np.fft.rfft(samples)).argmax() * rate / len(samples)


def test_samples_are_used_as_they_are():
    samples = tone()
    for source in ((samples, 16000), [samples, 16000.0], {"array": samples.tolist(), "sampling_rate": 16000}):
        audio = load_audio(source)
        assert audio.rate == 16000 and np.array_equal(audio.samples, samples.astype("float32"))
    both = load_audio((np.stack([samples, np.zeros_like(samples)]), 16000))
    np.testing.assert_allclose(both.samples, samples / 2, atol=1e-6)  # the mean of two channels


def test_files_and_other_rates_are_resampled(av, tmp_path):
    """A tone keeps its pitch and its length, of whatever rate, number of channels and form the file is."""
    (tmp_path / "tone.wav").write_bytes(wav(tone(rate=44100), 44100))
    flac = io.BytesIO()
    with av.open(flac, "w", format="flac") as out:
        stream = out.add_stream("flac", rate=48000, layout="mono")
        frame = av.AudioFrame.from_ndarray((tone(rate=48000) * 32767).astype("int16")[None], "s16", "mono")
        frame.sample_rate = 48000
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    for source in (
        wav(tone()),
        wav(np.stack([tone(rate=22050)] * 2), 22050),
        flac.getvalue(),
        str(tmp_path / "tone.wav"),
        {"bytes": None, "path": tmp_path / "tone.wav"},
        (tone(rate=8000), 8000),
        (tone(rate=44100), 44100),
        "data:audio/x-wav;codecs=1;base64," + base64.encodebytes(wav(tone())).decode(),  # lines of 76 characters
    ):
        audio = load_audio(source)
        assert audio.samples.dtype == np.float32 and abs(len(audio.samples) - 8000) < 40, len(audio.samples)
        assert abs(loudest(audio.samples) - 440) < 4 and abs(np.abs(audio.samples).max() - 0.5) < 0.05
    assert len(load_audio(wav(tone()), rate=8000).samples) == 4000


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("https://example.org/a.wav", "audio: expected a local path, bytes or samples, got the URL"),
        ("data:audio/wav;base64,AAA", "audio: expected a data URL with base64, got 'data:audio/wav;base64,AAA'"),
        ("data:audio/wav;base64,A*AA", "got 'data:audio/wav;base64,A*AA': Only base64 data is allowed"),
        ("data:audio/wav,RIFF", "got 'data:audio/wav,RIFF': no ';base64,' in it"),
        (7, "audio of type int: cannot be read: expected a path, bytes, or samples with their sampling rate"),
        (tone(), "audio of type ndarray: cannot be read: expected a path, bytes, or samples with their sampling rate"),
        ({"array": tone()}, "expected a sampling rate from 1000 to 384000 samples per second, got None"),
        ((tone(), 16), "expected a sampling rate from 1000 to 384000 samples per second, got 16"),
        ((tone(), 16000.5), "expected a sampling rate from 1000 to 384000 samples per second, got 16000.5"),
        ((tone(), np.inf), "expected a sampling rate from 1000 to 384000 samples per second, got inf"),
        ((tone(), np.nan), "expected a sampling rate from 1000 to 384000 samples per second, got nan"),
        ((tone(), np.complex128(16000)), "expected a sampling rate from 1000 to 384000 samples per second, got "),
        ({"array": {"left": [0.0]}, "sampling_rate": 16000}, "expected samples as an array of numbers, got dict: "),
        ((["loud"], 16000), "expected samples as an array of numbers, got list: "),
        (([[0.0], [0.0, 0.5]], 16000), "expected samples as an array of numbers, got list: "),
        (([10**400], 16000), "expected samples as an array of numbers, got list: "),
        ((np.zeros((2, 2, 8)), 16000), "expected samples [samples] or [channels, samples], got the shape [2, 2, 8]"),
        ((np.array([]), 16000), "expected samples [samples] or [channels, samples], got the shape [0]"),
        ((np.array([3.0, 900.0]), 16000), "expected samples from -1 to 1, got up to 900; divide integers by 2^15"),
        ((np.array([np.nan]), 16000), "expected samples from -1 to 1, got up to nan"),
    ],
)
def test_samples_that_cannot_be_used_are_named(source, error):
    with pytest.raises(ValueError, match="^audio") as caught:
        load_audio(source)
    assert error in str(caught.value), str(caught.value)


@pytest.mark.parametrize("rate", [16000, 8000])
@pytest.mark.parametrize("sample", [32768.0, 0.5])
def test_files_with_samples_far_beyond_1_are_refused(av, rate, sample):
    """A wav file of floats that were integers."""
    samples = np.zeros(8000, "<f4")
    samples[100] = sample
    size, formats = samples.nbytes, struct.pack("<IHHIIHH", 16, 3, 1, rate, 4 * rate, 4, 32)
    file = b"RIFF" + struct.pack("<I", 36 + size) + b"WAVEfmt " + formats + b"data" + struct.pack("<I", size)
    if sample == 0.5:
        assert np.abs(load_audio(file + samples.tobytes()).samples).max() < 1
        return
    with pytest.raises(ValueError, match="cannot be read: expected samples from -1 to 1, got up to [34]"):
        load_audio(file + samples.tobytes())


def test_files_that_cannot_be_used_are_named(av, tmp_path, monkeypatch):
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n/etc/hostname\n#EXT-X-ENDLIST\n"
    for source, error in (
        (b"no audio", "audio of type bytes: cannot be read: Invalid data found when processing input"),
        (playlist, "audio of type bytes: cannot be read: "),
        (b"ffconcat version 1.0\nfile /etc/hostname\n", "audio of type bytes: cannot be read: "),
        (str(tmp_path / "none.wav"), "none.wav': cannot be read: "),
        (str(tmp_path), "expected a regular file, got a folder"),
        (wav(np.zeros(0)), "expected sound, got no samples"),
        (wav(tone())[:9000], "audio of type bytes: cannot be read: expected a complete file of 16044 bytes, got 9000"),
        (float_wav([0.0, np.nan, 0.5]), "expected finite samples, got nan or infinity"),
        (wav(tone()).replace(b"\x01\0\x01\0", b"\x77\x77\x01\0", 1), "expected a codec that FFmpeg knows, got another"),
        ("", "audio: expected a path, bytes or samples, got an empty text"),
    ):
        with pytest.raises(ValueError, match="audio") as caught:
            load_audio(source)
        assert error in str(caught.value), str(caught.value)
    monkeypatch.setattr("rlkit.vlm.audios.MAX_SECONDS", 0.4)
    for source in (wav(tone()), (tone(), 16000)):
        with pytest.raises(ValueError, match="expected at most 0.4 s, got a longer sound"):
            load_audio(source)
    monkeypatch.setattr("rlkit.vlm.audios.DECODING_SECONDS", -1.0)
    with pytest.raises(ValueError, match="expected an audio that is decoded within -1 s"):
        load_audio(wav(tone()))


def test_reading_files_without_pyav_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    for source in (b"a file", (tone(rate=8000), 8000)):
        with pytest.raises(ImportError, match=r"package av: expected it to be installed, got none; .*\[audio\]"):
            load_audio(source)


def test_rows_of_a_file_have_audios(av, tmp_path):
    """In a column `audio` or `audios`, or in a message; paths are relative to the file, and lead nowhere else."""
    processor = family_processors.processor("qwen2_5_omni_thinker")
    data = tmp_path / "data"
    data.mkdir()
    for name in ("data/a.wav", "data/b.wav", "outside.wav"):
        (tmp_path / name).write_bytes(wav(tone()))
    part = [{"type": "audio", "audio": "a.wav"}, {"type": "text", "text": "What?"}]
    inline = [{"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(tone())).decode(), "format": "wav"}}]
    cut = [{"type": "input_audio", "input_audio": {"data": "UklGR", "format": "wav"}}]
    samples = {"array": tone(0.25).tolist(), "sampling_rate": 16000}
    rows = [
        {"question": "What?", "audio": "a.wav", "answer": "one"},
        {"question": "<audio>What <audio>?", "audios": ["b.wav", samples], "answer": "two"},
        {"messages": [{"role": "user", "content": part}], "answer": "part"},
        {"messages": [{"role": "user", "content": inline}], "answer": "inline"},
        {"messages": [{"role": "user", "content": cut}], "answer": "cut"},
        {"question": "What?", "audio": "../outside.wav", "answer": "outside"},
        {"question": "What?", "audio": "none.wav", "answer": "none"},
        {"question": "What?", "audio": {"array": {"left": [0.0]}, "sampling_rate": 16000}, "answer": "dict"},
        {"question": "What?", "audio": {"array": [0.0], "sampling_rate": float("inf")}, "answer": "infinity"},
    ]
    found, errors = {}, {}
    for row in rows:
        (data / "rows.jsonl").write_text(2 * '{"question": "?", "answer": "-"}\n' + json.dumps(row) + "\n")
        task = load_task(str(data / "rows.jsonl"))
        for one in [*task.train, *task.heldout]:
            if one["where"].endswith("row 3"):
                try:
                    found[row["answer"]] = encode_prompt(processor, one)
                except ValueError as error:
                    errors[row["answer"]] = str(error)
    assert {name: [len(one.samples) for one in sample.audios] for name, sample in found.items()} == {
        "one": [8000],
        "two": [8000, 4000],
        "part": [8000],
        "inline": [8000],
    }
    base = f"{data}/rows.jsonl row 3: audio: expected a data URL with base64, got 'data:audio/wav;base64,UklGR'"
    assert errors["cut"].startswith(base)
    assert "audios: expected a file in" in errors["outside"] and "outside.wav" in errors["outside"]
    assert all(errors[name].startswith(f"{data}/rows.jsonl row 3: audio") for name in ("none", "dict", "infinity"))
    assert "none.wav" in errors["none"] and "got dict" in errors["dict"] and "got inf" in errors["infinity"]
    (data / "rows.jsonl").write_text("".join(json.dumps(rows[i]) + "\n" for i in (0, 0, 0, 6)))
    task = load_task(str(data / "rows.jsonl"))
    text = " ".join(finding.text for finding in check_rows(task, processor))
    assert "0 to 0 images, 1 to 1 audios each" in text and "would be skipped" in text
    assert "images: none; audios: 0.5 s" in " ".join(show_rows(task, processor))


def test_models_that_do_not_hear_are_named():
    row = {"question": "What?", "audio": (tone(), 16000), "where": "row 4"}
    sees = family_processors.processor("qwen2_vl")
    for processor, error in (
        (sees.tokenizer, "audios: expected none, as the model's processor is a tokenizer, got 1"),
        (
            sees,
            "audios: expected a model with one of Gemma3nProcessor, .*, Qwen3OmniMoeProcessor, got Qwen2VLProcessor",
        ),
    ):
        with pytest.raises(ValueError, match=f"^row 4: {error}"):
            encode_prompt(processor, row)


def test_a_processor_whose_audio_tokens_are_not_one_run_is_refused():
    """The error names the audios and how their tokens are found, not images."""
    processor = family_processors.processor(OMNI[0])

    class Interrupting:
        def __getattr__(self, name):
            return getattr(processor, name)

        def __call__(self, **kwargs):
            inputs = processor(**kwargs)
            place = inputs["input_ids"][0].tolist().index(placeholder_id(processor, "audio")) + 1
            inputs["input_ids"][0, place] = 7
            return inputs

    Interrupting.__name__ = type(processor).__name__
    error = "row 4: processor: expected runs of its placeholder .* got a Qwen2_5OmniProcessor .* to the audios of"
    with pytest.raises(ValueError, match=error):
        encode_prompt(Interrupting(), {"question": "What?", "audio": (tone(), 16000), "where": "row 4"})


def test_audios_that_a_processor_would_cut_off_are_named():
    """The limit of Qwen2.5-Omni is 4 s here, a length that Qwen3-Omni takes. A token needs 0.04 s."""
    long, short = ({"question": "?", "audio": (tone(seconds), 16000)} for seconds in (4.1, 0.03))
    with pytest.raises(ValueError, match=r"audio: expected at most 4 s for Qwen2_5OmniProcessor, got 4.1 s"):
        encode_prompt(family_processors.processor(OMNI[0]), long)
    assert encode_prompt(family_processors.processor(OMNI[1]), long).vision["input_features"].shape[2] == 411
    for family in ("gemma4", "gemma4_unified"):
        row = {"question": "?", "audio": (tone(30.1), 16000)}
        with pytest.raises(ValueError, match=r"audio: expected at most 30 s for Gemma4\w*Processor, got 30.1 s"):
            encode_prompt(family_processors.processor(family), row)
    for family in HEARS:
        with pytest.raises(ValueError, match=r"audio: expected at least 0.04 s, got 0.03 s"):
            encode_prompt(family_processors.processor(family), short)


@pytest.mark.parametrize("family", HEARS)
def test_features_of_an_audio_do_not_depend_on_the_rows_beside_it(family):
    """With an audio of the same prompt, an observation's audio, or another row's; the shortest is one token long."""
    processor, model = family_processors.processor(family), family_processors.model(family)
    sounds = [(tone(seconds, pitch=pitch), 16000) for seconds, pitch in ((1.2, 300), (1.317, 900), (0.05, 500))]
    alone = [encode_prompt(processor, {"question": "?", "audio": sound}) for sound in sounds]
    both = encode_prompt(processor, {"question": "? <audio> <audio>", "audios": sounds[:2]})
    observed = append_observation(both, alone[2])
    check_sample(observed)
    assert [len(one.audios) for one in (both, observed)] == [2, 3]

    def features(vision):
        with torch.no_grad():
            if "omni" in family:
                return model.get_audio_features(**vision).last_hidden_state
            if family == "gemma3n":  # as its forward, to which the mask is that of frames, not of padding
                vision = {**vision, "input_features_mask": ~vision["input_features_mask"]}
                found = model.model.get_audio_features(**vision)
                return found.pooler_output[~found.audio_mel_mask]
            found = model.model.get_audio_features(**vision)
            return found.pooler_output[found.attention_mask]

    expected = torch.cat([features(one.vision) for one in alone])
    for vision in (observed.vision, concatenate_vision([one.vision for one in alone])):
        torch.testing.assert_close(features(vision), expected, atol=1e-5, rtol=1e-5)


def test_audios_of_gemma4_do_not_depend_on_the_attention_that_was_chosen():
    """With eager attention the audio tower of transformers 5.19 alone takes its mask for the opposite."""
    model, right = family_processors.model("gemma4"), family_processors.model("gemma4").model
    model.set_attn_implementation({"audio_config": "eager"})
    features, mask = torch.randn(1, 24, 8), torch.ones(1, 24, dtype=torch.bool)
    with torch.no_grad():
        expected, longer = (
            right.get_audio_features(features[:, :frames], mask[:, :frames]).pooler_output for frames in (16, 24)
        )
        torch.testing.assert_close(longer[:, :4], expected, atol=1e-5, rtol=1e-5)  # a frame hears earlier ones only
        wrong = model.model.get_audio_features(features, mask).pooler_output
        assert (wrong - longer).abs().max() > 0.1
        trained = make_engine("fsdp2", model=model, device="cpu").module
        found = trained.model.get_audio_features(features, mask).pooler_output
    torch.testing.assert_close(found, longer, atol=1e-5, rtol=1e-5)


def test_an_exported_thinker_is_a_part_of_a_whole_model(tmp_path):
    """As in published checkpoints: rlkit and transformers read it, whole or in shards, and vLLM (`make families`)."""
    processor, base = family_processors.processor(OMNI[1]), family_processors.model(OMNI[1])
    parameters = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    engine, path = make_engine("fsdp2", model=base, device="cpu", processor=processor), str(tmp_path / "model")
    weights = {name: x.clone() for name, x in engine.get_per_tensor_param()}
    assert all(name.startswith("thinker.") for name in weights)
    engine.export_hf(path)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "qwen3_omni_moe"
    assert type(load_processor(path)) is type(processor) and load_config(path).name_or_path == path
    in_shards = make_engine("fsdp2", model=load_model(path, on_meta=True), device="cpu")
    assert all(torch.equal(x, weights[name]) for name, x in in_shards.get_per_tensor_param())
    (one, other) = (found.state_dict() for found in (type(base).from_pretrained(path), load_model(path)))
    assert all(torch.equal(one[name], x) and torch.equal(other[name], x) for name, x in parameters.items())


def test_vllm_gets_the_sound_that_the_trainer_hears():
    sample = encode_prompt(family_processors.processor(OMNI[1]), {"question": "?", "audio": (tone(), 16000)})
    ((samples, rate),) = vllm_prompt(sample, family_processors.processor(OMNI[1]))["multi_modal_data"]["audio"]
    assert rate == 16000 and samples is sample.audios[0].samples and isinstance(sample.audios[0], Audio)
    assert len(samples) == 16000 and not samples[8000:].any()  # silence up to a second
