"""Write docs/families.md out of what the tests are parametrised with: `python docs/make_families.py`."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "families.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # this checkout's rlkit, installed or not

EVERY = "vlm/test_every_family.py"
# column -> (file, test, parameter), the last being the family's name or the name of a case that has it
COLUMNS: dict[str, list[tuple[str, str, str]]] = {
    "positions": [
        ("vlm/test_rope3d.py", "test_rope3d_equals_transformers", "model_type"),
        ("vlm/test_rope3d_omni.py", "test_rope3d_equals_transformers", "package"),
    ],
    "packed": [
        ("engines/test_families.py", "test_text_family_equals_one_sequence_at_a_time", "family"),
        ("engines/test_families.py", "test_vision_family_equals_one_sequence_at_a_time", "family"),
        (EVERY, "test_a_training_step_packed_equals_padded", "family"),
    ],
    "Ulysses": [
        ("engines/test_ulysses.py", "test_family_equals_one_sequence_at_a_time", "family"),
        ("engines/test_ulysses.py", "test_token_mean_invariant_to_sequence_and_tensor_parallel", "name"),
    ],
    "mixed batch": [
        (EVERY, "test_a_blank_image_changes_no_number", "family"),
        ("engines/test_dummy_images.py", "test_a_dummy_image_changes_no_output_and_goes_through_the_tower", "family"),
    ],
    "processor": [(EVERY, "test_tokens_are_the_processors_own", "family")],
    "videos": [(EVERY, "test_gradients_of_packed_videos_are_those_of_transformers", "family")],
    "audio": [(EVERY, "test_gradients_of_packed_audios_are_those_of_transformers", "family")],
    "freeze": [(EVERY, "test_frozen_parameters_do_not_move", "family")],
    "LoRA": [(EVERY, "test_lora_moves_adapters_alone_and_merges", "family")],
    "HF sampler": [(EVERY, "test_the_samplers_logprobs_are_the_trainers", "family")],
    "vLLM": [
        ("rollout/test_vllm.py", "test_logprobs_are_the_trainers_whenever_weights_were_synced", "kind"),
        ("rollout/test_vllm.py", "test_a_family_samples_what_its_trainer_scores", "family"),
        ("rollout/test_vllm.py", "test_a_family_samples_what_its_trainer_scores_in_bfloat16", "family"),
        ("rollout/more_families_vllm.py", "test_a_family_samples_what_its_trainer_scores", "family"),
        ("rollout/more_families_vllm.py", "test_a_family_samples_what_its_trainer_scores_in_bfloat16", "family"),
    ],
}
HEAD = """# Model families

Which features are tested for which model family, each on a tiny model with random weights. Families are named by
transformers' `model_type`. Every cell has a value: `yes` means tested, and `no` means refused, for a reason given
below. `plain`: positions are 0, 1, 2, ..., so there are no 3D RoPE ids. `text`: the family has no images. The
second table explains the columns. If your family is not listed, `python -m rlkit.doctor --model DIR` says what it
finds; to add it, see [contributing](contributing.md#a-model-family). The page is generated from the parameters of the
tests (`python docs/make_families.py`).

## Table

"""
MEANING = {
    "positions": "3D RoPE ids are exactly those of transformers, for random layouts and paddings",
    "packed": "packed rows give the same logprobs and gradients as single sequences, and as padded rows",
    "Ulysses": "two processes that share each sequence give the same numbers as one process",
    "mixed batch": "a rank without images runs a blank image through the vision tower, which changes no number",
    "processor": "prompt tokens are those of transformers' processor, and an image has as many tokens as features",
    "videos": "prompt tokens are those of transformers' processor; packed rows with shared prompts give the logprobs "
    "and gradients of single sequences, and the samplers' logprobs equal the trainer's",
    "audio": "the same for audios",
    "freeze": "frozen parameters have no gradient and do not change, in the fsdp2 engine",
    "LoRA": "only the adapters change; merged weights give the same logprobs; `disable_adapter` gives the base model",
    "HF sampler": "`--rollout hf`: the sampler's logprobs equal the trainer's",
    "vLLM": "`--rollout vllm` on a CPU: the sampler's logprobs equal the trainer's after every weight update",
}


BY_TRANSFORMERS = """\
- **Families that vLLM runs by transformers' code** ({}, and all others that have no model in vLLM). vLLM changes the
class of such a model for torch.compile. The trainer's model would then fail in the same process: "'Olmo3Model' object
has no attribute 'do_not_compile'". Rollout `vllm` registers models that leave the class alone
(rlkit/rollout/vllm_transformers.py) and sets `enforce_eager`, so vLLM does not compile them. Servers run vLLM's own
models. All this was seen on a CPU only, where nothing is compiled in any case."""
WRAPPED: dict[str, Any] = {"width": 120, "break_long_words": False, "break_on_hyphens": False}


def load(file: str) -> ModuleType:
    path = ROOT / "tests" / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def parameters(test: Callable, name: str) -> list[str]:
    """What `name` is in the cases of a test."""
    found = []
    for mark in getattr(test, "pytestmark", ()):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else list(mark.args[0])
        if mark.name == "parametrize" and name in names:
            at = names.index(name)
            found += [value if len(names) == 1 else value[at] for value in mark.args[1]]
    return found


def family(module: ModuleType, value: str) -> str:
    case = getattr(module, "CASES", {}).get(value)
    name = value if case is None else case.model
    return name.removesuffix("_sliding").removesuffix("_tied").removesuffix("_thinker")


def by_value(values: dict[str, str]) -> dict[str, str]:
    """value -> the names that have it, separated by commas."""
    return {value: ", ".join(name for name in values if values[name] == value) for value in values.values()}


def nested(items: dict[str, str]) -> str:
    """A nested list of `key: value`."""
    indent = " " * 6
    return "\n".join(fill(f"    - {key}: {value}", subsequent_indent=indent, **WRAPPED) for key, value in items.items())


def page() -> str:
    modules = {file: load(file) for tests in COLUMNS.values() for file, _, _ in tests}
    found = {
        column: {
            family(modules[file], value)
            for file, test, name in tests
            for value in parameters(getattr(modules[file], test), name)
        }
        for column, tests in COLUMNS.items()
    }
    families, every = modules["engines/test_families.py"], modules[EVERY]
    three_axes = found["positions"]
    by_model_type = [name.removesuffix("_thinker") for name in every.SEES]
    sees = {*by_model_type, *(name.removesuffix("_thinker") for name in families.VISION)}
    vllm = modules["rollout/test_vllm.py"]
    recurrent = {*families.RECURRENT, *families.RECURRENT_VISION}
    indexed = {*families.INDEXED, *families.INDEXED_VISION}
    not_shared = load("engines/on_ulysses_ranks.py").NOT_SHARED
    refused = {
        "packed": {*families.REFUSED},
        "Ulysses": not_shared,
        "videos": {*by_model_type} - {name.removesuffix("_thinker") for name in [*every.WATCHES, *every.OMNI]},
        "audio": {*by_model_type} - {name.removesuffix("_thinker") for name in every.HEARS},
        "vLLM": {*vllm.OBSTACLES, "cohere_compass", "glm5_next", "qwen4_exp", *vllm.REFUSED},
    }

    def cell(column: str, name: str) -> str:
        if column == "positions" and name not in three_axes:
            return "plain"
        if column in ("mixed batch", "processor", "videos", "audio") and name not in sees | three_axes:
            return "text"
        if name in refused.get(column, ()):
            return "no"
        if name not in found[column]:
            raise ValueError(f"{name}: expected a test or a refusal for the column {column!r}, got neither")
        return "yes"

    names = {*sees, *three_axes}, {name for column in found.values() for name in column}
    rows = [*sorted(names[0]), *sorted(names[1] - names[0])]
    heads = list(COLUMNS)
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(cell(column, name) for column in heads)} |" for name in rows]
    lines += ["", "| column | yes means | test |", "|---|---|---|"]
    for column, tests in COLUMNS.items():
        by = ", ".join(dict.fromkeys(f"`{file.split('/')[1]}`" for file, _, _ in tests))
        lines.append(f"| {column} | {MEANING[column]} | {by} |")
    not_packed = ", ".join(sorted(families.REFUSED))
    positions = ", ".join(sorted(load("vlm/test_rope3d_specs.py").ROPE3D_REFUSED))
    image_attention, with_vllm = vllm.REFUSED["gemma3"], vllm.REFUSED["diffllama"]
    on_cpu = nested({names: why for why, names in by_value(vllm.OBSTACLES).items()})
    configs = load("engines/family_configs.py")
    of_transformers = ", ".join(sorted(vllm.BY_TRANSFORMERS))
    by_transformers = fill(BY_TRANSFORMERS.format(of_transformers), subsequent_indent="  ", **WRAPPED)
    parts = {name: ", ".join(f"`{part}`" for part in layer) for name, layer in sorted(configs.MADE_OF_FULL.items())}
    made_of_full = nested({names: layer for layer, names in by_value(parts).items()})
    refused_vision = nested(every.REFUSED_VISION_FAMILIES)
    text_rows_only = nested(load("vlm/test_text_rows_only.py").TEXT_ROWS_ONLY)
    not_split = nested({"recurrent layers": ", ".join(sorted(recurrent)), "indexers": ", ".join(sorted(indexed))})
    more = f"""
## Not supported

These are refused with an error that says why:

- packed rows: {not_packed}. These train with `--no_use_remove_padding`;
- Ulysses: {", ".join(sorted(not_shared - {*families.REFUSED}))}, whose image experts have no gradient on a rank
  without image tokens, and all families whose rows cannot be packed;
- tensor parallelism and Megatron, for families with
{not_split}
- positions: {positions};
- videos and audios in a task's rows, for every family with `no` in that column. SGLang servers refuse both: use
  `--rollout hf` or vLLM (in the process or on servers). Megatron trains on videos (Qwen2.5-VL), but not on audios;
- images and videos of these families, whose rows of text can be trained on (those of minimax_m3_vl cannot be packed):
{text_rows_only}
- all rows of these families:
{refused_vision}
- rows with several videos of GLM-4V (all its versions) in vLLM, which takes one per prompt;
- vLLM: diffllama, with vLLM's own words: "{with_vllm}";
- vLLM on a CPU:
{on_cpu}
- vLLM on a CPU, rows with images of gemma3, and of gemma4 where tokens of an image attend to later ones
  ("{image_attention}"). Some of vLLM's attention
  back ends for GPUs support this, so it is not refused there; this was not tested;
- vLLM on a GPU: weight updates of gpt_oss;
- prefix attention (PaliGemma), and dynamic RoPE, in which sequences of one forward pass would affect each other. With
  LongRoPE (Phi-3, MiniCPM) a run uses one set of factors: [sampling](sampling.md#longrope).

## Weight files

What happens to files as published (`python -m rlkit.doctor --model DIR` names what a run would refuse):

- **bfloat16, float16 or float32** in safetensors (one file, or several with an index): each rank reads its part.
  `pytorch_model.bin` is read whole on each rank, as tensors only: no code in it runs. A GGUF file (`--model FILE.gguf`)
  of llama, qwen2, qwen3, gemma2 or gemma3 is converted to safetensors once.
- **Weights that are made of full tensors**, with fsdp2 and fsdp1: each rank holds all of them in host memory before it
  keeps its part; `python -m rlkit.plan` counts them. All other weights are read in slices. They are, in each layer of
{made_of_full}
- **Quantized weights that can be converted**: FP8 with scales for blocks, rows or matrices (DeepSeek, Qwen, GLM,
  Mistral, compressed-tensors, modelopt, fbgemm), integers of compressed-tensors (Kimi) and MXFP4 (gpt-oss) are refused.
  `python -m rlkit.vlm.dequantize DIR NEW_DIRECTORY` writes them in bfloat16, for the trainer and for vLLM, with one
  file in memory at a time. To sample in FP8 anyway, use vLLM's `--rollout_options quantization fp8`.
- **Other quantized weights** (GPTQ, AWQ, bitsandbytes, torchao, quark, NVFP4) are refused: use the bfloat16 model that
  they were made from. For LoRA, `--quantize_base` stores that model in 4 bits:
  [docs/engines.md](engines.md#lora-above-weights-of-4-bits).
- **Adapters** (`adapter_config.json`) are refused: merge them into their base model with peft's `merge_and_unload()`.
- **A missing weight**, or one of another shape, is refused by name. transformers alone would initialise it randomly.
- **Weights without a place in the model** are named and left out, also of the export. Weights for multi-token
  prediction (`mtp.*`, layer 61 of DeepSeek-V3) are left out without a message where transformers expects them.
- **An output layer in addition to tied embeddings** is refused unless the two are equal: transformers would use it,
  vLLM would not.
- **`model.safetensors` beside an index of other files** is refused: transformers reads the first, vLLM the others.
- **Weight names of older repositories** (`language_model.model`, `visual`) are read, as in transformers.
- **dtypes** are what `--dtype` says, except where transformers keeps float32, such as for the routers of ERNIE 4.5 and
  the correction bias of DeepSeek-V3. FSDP trains weights of one dtype, so ERNIE 4.5 with experts needs the default,
  `--dtype float32`. A reference or teacher of this family keeps the dtypes of its files.
- **`generation_config.json`**: a run uses only its end tokens, all of them. Its temperature, top-k, top-p and penalties
  are ignored, in hf and in vLLM, and copied to the export.

## Notes

- **Qwen-Omni.** Only the thinker is trained, the part that writes text; `load_model` takes it out of a whole model. An
  export has no talker (the part that speaks); vLLM and transformers' class of the thinker can read it. Rows may have
  images, audios and videos, and with `--video_sound` the sound of video files. With LoRA, Qwen3-Omni needs
  `--target_modules` such as ".*[qkvo]_proj", because peft's all-linear confuses modules of the vision tower with
  layers of the same name.
- **Videos of Qwen-Omni.** The processor takes one frame rate for all videos of a call, so rlkit calls it once for each
  video. Qwen3-Omni has whole position ids only if frames are a multiple of half a second apart. Files are read at such
  a rate, and lists of frames at another rate are refused. vLLM takes one frame rate per prompt, so rollout `vllm`
  refuses a prompt with videos of several rates. vLLM's servers take no frame rate, so they refuse videos.
- **Videos of Qwen-Omni with sound, in vLLM.** Rollout `vllm` refuses them for Qwen2.5-Omni: vLLM 0.32 gives the
  position id of the first video token to `<|audio_bos|>`, the token before it, so all later ids come one token too
  early, and logprobs would differ by 0.1. For Qwen3-Omni it accepts prompts in which all videos have sound and there
  are no other audios. vLLM's caches identify a video by its frames alone. For Qwen3-Omni rlkit therefore switches off
  the processor cache, and adds the sound to the identity of a video in the prefix cache.
- **deepseek_v3 with vLLM on a CPU.** vLLM supports only the published attention size (`kv_lora_rank` 512,
  `qk_rope_head_dim` 64). The config must have `topk_method` and `scoring_func`, which transformers' defaults leave out.
- **Recurrent layers** (gated delta rule, Mamba, short convolutions) carry a state from token to token. In packed rows
  they get each sequence as a row of its own, while all other layers compute the packed row
  (rlkit/engines/packing/separate_sequences.py). If responses share a prompt, layers with the gated delta rule compute
  the prompt once and pass its last state to each response; Mamba layers and short convolutions compute the prompt once
  per response. With Ulysses, each rank gathers the inputs of such a layer and computes all of its tokens, so the ranks
  share the time and memory of all other layers, but not of these. With gradient checkpointing, only one of these layers
  at a time holds activations of all tokens. On a GPU, `pip install -e '.[linear-attention]'` and
  `pip install --no-build-isolation causal-conv1d` install the kernels that transformers uses for the gated delta rule.
  Those for Mamba are in causal-conv1d and mamba-ssm (`MAMBA_KEEP_CUDA_BUILD=TRUE pip install --no-build-isolation
  mamba-ssm`; the variable is for Jamba's kernel); rlkit was not tested with them.
  Adapters are not put on `out_proj` and `conv1d` of Mamba layers, whose weights go into a fused kernel on GPUs.
- **Llama 4.** Chunked attention counts its chunks from the start of each packed sequence, and the temperature of layers
  without RoPE follows the positions, as in single sequences. `--rollout hf` refuses left-padded rows from `floor_scale`
  (8192) tokens on, because transformers' temperature counts padding there; use vLLM. Routers get no LoRA adapters.
- **Gated delta rule with vLLM on a CPU** ({", ".join([*vllm.BFLOAT16, *vllm.MORE_BFLOAT16])}): vLLM's
  kernel supports only bfloat16 and heads of 128, so sampler and trainer (float32) agree to
  {vllm.BFLOAT16_TOLERANCE} there. On an x86 CPU without AVX-512 rlkit refuses these families; use `--rollout hf`.
- **nemotron_h.** transformers 5.19 clamps the time steps of its Mamba layers to at least `time_step_min`; the authors'
  code, vLLM and the engine use `time_step_limit` instead. vLLM is tested without experts, as in Nemotron-H 8B and
  47B; with experts it refuses a CPU: "is_act_and_mul=False is supported only for CUDA, XPU and ROCm for now".
- **lfm2, lfm2_moe, lfm2_vl with vLLM on a CPU.** vLLM's RoPE kernel for CPUs misreads the queries of these families,
  and of multi-head latent attention without YaRN. rlkit has vLLM compute it in PyTorch there.
- **gemma4, gemma4_unified.** In larger models (`use_bidirectional_attention` "vision") the tokens of an image attend to
  later ones of that image, within the window of layers with a sliding window. In transformers 5.19 the forward of Gemma
  4 Unified does this in all layers, unlike its `generate`, Gemma 4 and vLLM; the engine does it like these three. vLLM
  has no such attention on a CPU. So rollout `vllm` refuses images on a CPU, and `vllm_server` refuses them for servers
  that `rlkit.rollout.serve` started there. Rollout `vllm` is tested with causal images.
- **Audios of Gemma 4.** Only the smaller models have an audio tower; the larger ones refuse rows with audios. Gemma 4
  Unified takes the waveform in pieces of 640 samples. With `eager` attention the audio tower of transformers 5.19
  attends where it should not: it expects a boolean mask, but gets a numeric one, in which 0 allows attention. The
  engine sets `sdpa` in that tower.
- **gemma3n, gemma3n_text with vLLM.** vLLM 0.32's text-only class leaves out the per-layer embeddings, so the logprobs
  of the tiny model differ by 0.3. Both classes leave out a factor before a norm, so its epsilon counts less than in
  transformers, and the logprobs differ by 7e-5. rlkit registers classes that compute as transformers does
  (rlkit/rollout/vllm_gemma3n.py). Servers have them if `rlkit.rollout.serve` started them.
{by_transformers}
- **gpt_oss with vLLM.** vLLM 0.32 keeps the old experts and attention sinks when weights are updated. rlkit registers a
  class that loads them like other weights (rlkit/rollout/vllm_gpt_oss.py); this is tested on a CPU. Some attention back
  ends for GPUs compute with a copy of the sinks, so updates are refused there: "expected a family whose weights vLLM
  replaces completely on a GPU". Published files are in MXFP4 and must be converted first (see above).
- **glm46v with vLLM.** vLLM 0.32 does not know the name of its class. rlkit names the class of GLM-4.1V, which works,
  by `hf_overrides`.
- **gemma3n.** Its vision tower is MobileNet-v5 of the package timm: `pip install -e '.[gemma3n]'`. Every image has 256
  tokens, and every audio (of at most 30 s) has 188; vLLM 0.32 has these numbers in its code. The features of each audio
  are computed alone, because transformers' feature extractor appends frames to an audio next to a longer one. Up to
  0.06 s of silence is appended to an audio; without it, the last token would depend on the lengths of the other audios
  in the same forward.
- **paddleocr_vl.** transformers 5.19 resizes the position embeddings of its vision tower with `align_corners=True`; the
  authors' code, transformers 5.0 and vLLM do not. The engine does as they do; otherwise logprobs would differ by 0.02.
  A model that is loaded in transformers alone computes as transformers does.
- **Names of weights in vLLM.** Kimi K2.5, Kimi-Linear, ERNIE 4.5 VL, GLM-5.3-Flash and OLMo Hybrid have other weight
  names in transformers than in the published files, which vLLM reads; rlkit sends and exports weights under the latter.
  For all of them except OLMo Hybrid, and for GLM-5 and Cohere Compass, `make families` makes vLLM's class on a CPU and
  loads all weights into it. Logprobs were not compared, because that needs a GPU or the published files.
- **kimi_k25 with vLLM.** vLLM's model is called `KimiK25ForConditionalGeneration`, as in the published `config.json`,
  and needs the `media_proc_cfg` of the published processor. transformers writes `Kimi_K25ForConditionalGeneration` into
  an export, for which vLLM 0.32 runs transformers' own model, which fails for videos. vLLM's own model takes images,
  and videos in chunks of four frames, as `vision_chunk`; rollout `vllm` sends them in this form. Servers cannot take
  it, so they refuse prompts with images and videos. `make families` lets vLLM's processor read such prompts on a CPU:
  tokens and sizes equal the trainer's. No run on a GPU was tested. On a CPU rollout `vllm` refuses the family.
- **olmo_hybrid with vLLM.** vLLM 0.32 loads no files of it: its mapper marks the convolutions of queries, keys and
  values by an attribute that the loader of the merged convolution does not read ("list indices must be integers or
  slices, not NoneType").
- **mistral4** is the text model of Mistral Small 4: multi-head latent attention, and experts in every layer. The whole
  model has the type `mistral3` and a vision tower; `AutoModelForCausalLM` of transformers 5.19 does not know `mistral4`
  alone. vLLM 0.32 reads it only in Mistral's own format, as a DeepSeek-V3 with other names. rlkit registers a class
  with vLLM that reads transformers' configuration and names (rlkit/rollout/vllm_mistral4.py). On a CPU vLLM supports
  only the attention size of DeepSeek-V3, so the published model needs a GPU; this was not tested.
- **Mistral's repositories** contain a model twice: for transformers (`config.json`, `model*.safetensors`) and in
  Mistral's own format (`params.json`, `consolidated*.safetensors`), with other weight names. vLLM prefers the second;
  rlkit makes it read the first. If `model.safetensors` has no index, vLLM would load both files: move the consolidated
  one away.
- **deepseek_v32, glm_moe_dsa** (DeepSeek-V3.2, GLM-5) attend to the tokens that an indexer chooses among all tokens of
  a row. In packed rows these layers, like recurrent layers, get each sequence with its prompt as a row of its own, and
  compute it by SDPA with a mask. So their memory grows with the square of the longest sequence, and they compute a
  shared prompt once per response. Ulysses treats them like recurrent layers. The choice has no gradient: neither the
  indexer nor adapters on it are trained.
- **Videos of GLM-4.6V and GLM-OCR with vLLM.** Their processor writes the time of every second frame with a decimal,
  "0.8 seconds". vLLM rounds times down to seconds, so every second frame must fall on a whole second, as it does at the
  default rate of 2 frames per second. Long videos have a lower rate: `--video_frames` must be at least twice the
  seconds.
- **Videos of Gemma 4**, also of Gemma 4 Unified. The forward of transformers 5.19 fails with videos: it calls
  `get_video_features` without the required `num_frames_per_video`. rlkit passes frames as images instead, which is the
  same for the vision tower; the prompt keeps the placeholders of videos. In a micro-batch with images, frames are
  padded to as many patches as an image may have. A frame has at most 70 tokens, the only number that vLLM knows.
- **Tiles of LLaVA-NeXT, LLaVA-NeXT-Video and LLaVA-OneVision.** An image is encoded whole and in tiles. The number of
  tiles depends on its size; in a micro-batch images are padded to the largest number. LLaVA-OneVision encodes each
  image of a prompt in tiles, as vLLM does; transformers' `apply_chat_template` does so only if there is a single image.
- **Videos of LLaVA-OneVision and LLaVA-NeXT-Video.** The forward of transformers 5.19 needs videos with equal numbers
  of frames. In the engine a hook encodes the frames of all videos together (`encode_llava_videos`), so a micro-batch
  may have videos of different lengths.
- **Videos of VideoLLaMA 3.** Patches that equal those of the previous frame get no tokens. vLLM runs transformers' code
  for this family and fails with its videos: "VideoLlama3Processor returned 8 row(s) of `video_compression_mask` for 1
  video(s) with 32 patch(es), so the rows cannot be attributed to a video." Rollout `vllm` and servers take its images,
  and refuse its videos.
- **llava_next_video with vLLM.** vLLM 0.32 takes only its videos. Rollout `vllm` and servers refuse its images.
- **muse_glimmer with vLLM.** vLLM 0.32 asks the processor for `<|image|>`, while that of transformers 5.19 expects
  `<|patch|>`. It stops at a prompt with an image: "0 image sentinel(s) in text but 1 image(s) given". rlkit refuses the
  family on a CPU; no run on a GPU was tested.
- **axk1 with vLLM.** vLLM 0.32 makes a norm in layers without experts that it never calls, and then misses its weight.
  rlkit registers a class without it (rlkit/rollout/vllm_axk1.py).
- **longcat_flash.** transformers 5.19 has weights for the experts that return their input (`zero_expert_num`), and
  does not use them. Files without these weights are refused: "expected weights in the shapes of its config.json". vLLM
  0.32 does not know them either ("KeyError: 'layers.0.mlp.experts.4.gate_proj.weight'").
- **zamba2 with vLLM.** Logprobs of the tiny model agree to 4e-5 in float32, those of most families to 1e-5.
- **exaone4_5 with vLLM.** vLLM 0.32 assumes that its vision tower normalizes pixels, and leaves this out of the
  processor, so logprobs of the tiny model differ by 0.7. rlkit sets vLLM's `mm_device_do_normalize` to False, also in
  servers that `rlkit.rollout.serve` started; set it by hand in others.
- **cohere2, cohere2_moe with vLLM.** In layers with a sliding window of W, a token attends to itself and the W - 1
  tokens before it in transformers, but to the W tokens before it in vLLM 0.32. rlkit corrects vLLM by `hf_overrides`.
- **apertus with vLLM.** vLLM 0.32 keeps the parameters of the activation in bfloat16; in float32 the logprobs of the
  tiny model differ by 2.5e-3. rlkit registers a class with them in the dtype of the other weights
  (rlkit/rollout/vllm_apertus.py).
- **phimoe with vLLM.** vLLM 0.32 knows the class name of Microsoft's files, but not that of transformers, which an
  export has. rlkit names the former by `hf_overrides`.
- **qwen2_moe with `use_sliding_window`, phimoe with `sliding_window`.** transformers 5.19 applies the window by a mask
  and does not pass it to the attention function. The engine reads it from the configuration. vLLM 0.32 ignores the
  windows of qwen2_moe if only some layers have one; SGLang ignores all of them (according to its code). So rollouts
  `vllm`, `vllm_server` and `sglang`, and teachers on servers, refuse contexts longer than the window. Use `--rollout
  hf`, or shorter sequences.
- **`sliding_window` in a configuration whose class has none, such as llama's, with vLLM.** transformers ignores it,
  vLLM 0.32 applies it to all layers; with a window of 5, logprobs of a tiny Llama differ by 2.9. rlkit removes it from
  vLLM's configuration by `hf_overrides`, also in servers that `rlkit.rollout.serve` started. Other servers are refused
  unless their context fits into the window.
- **minicpm3, granite, hyperclovax and other families that scale or cap their logits** refuse `--use_fused_kernels`.
- **hyperclovax_vision_v2** takes images. Its videos are refused: the chat template writes a placeholder for the length
  of a video, which transformers' processor replaces when it expands the text. vLLM runs transformers' code for this
  family and misses the scale of logits, because it looks for another name; logprobs of the tiny model differ by 2.
  rlkit sets that name by `hf_overrides`.
- **minimax_m3_vl_text** (the text model of MiniMax-M3) attends to blocks that an indexer chooses. Packed rows are
  refused: "its layers of minimax_m3_sparse are not supported by packed attention". As of deepseek_v4, `--rollout hf`
  refuses rows that are padded on the left, of prompts of different lengths: their logprobs differed by 0.2.
- **Images of minimax_m3_vl.** In the vision tower of transformers 5.19 the patches of all images and videos of a
  forward attend to each other, so the features of an image depend on the others; logprobs of the tiny model
  differed by 0.1. vLLM computes each image alone.
- **deepseek_v4** attends to blocks of tokens, each of which becomes one key. Packed rows are refused. transformers 5.19
  counts the blocks of padded rows from their first column, padding included: logprobs of the tiny model differ by 0.5
  in rows padded on the left. `--rollout hf` refuses such rows. vLLM needs a GPU, which was not tested.
- **zaya, inkling_text, hy_v4.** Their layers have convolutions of keys and values, or an indexer with sinks, which
  packed rows do not support. With `--no_use_remove_padding` logprobs and gradients equal those of single sequences.
- **jetmoe with vLLM.** JetMoE repeats its keys for each expert before it calls attention. vLLM 0.32 runs transformers'
  code for it and treats the repetitions as keys of further tokens. rlkit refuses the family on a CPU; on a GPU
  `WeightSyncCheck` would stop such a run.
- **dbrx with vLLM.** vLLM 0.32 cannot load it: "KeyError: 'blocks.0.ffn.experts.w13_weight'", a name that its own
  expert layer no longer has.
- **nemotron** (Nemotron-4, Minitron). The layers of transformers 5.19 pass no further arguments to their attention, so
  it cannot know where sequences begin. Packed rows are refused.
- **hrm_text** with `prefix_lm`, the default, is refused: tokens of a prompt attend to later ones.
- **deepseek_v2, afmoe and hy_v3 with vLLM** need fields of their published configurations that transformers' classes
  lack, such as `topk_group`, `score_func` and `expert_hidden_dim`.
- **Videos of InternVL, MiniCPM-V 4.6, LLaVA-NeXT-Video and LLaVA-OneVision.** All videos of a row must have the same
  number of frames, because transformers' processors stack them. None of these processors writes the times of frames. In
  the prompt that vLLM reports, frames of InternVL consist of video placeholders instead of image placeholders; rlkit
  treats both as the same.
- **Videos of Kimi K2.5.** Four frames are a chunk, from which the vision tower makes the features of one frame.
  transformers 5.19 fails for chunks of different numbers of frames ("Sizes of tensors must match"), and for others it
  splits the features by the number before: "split_with_sizes expects split_sizes to sum exactly to 9 [...], but got
  split_sizes=[27]". In the engine a hook merges the frames and gives the forward the features (`encode_kimi_videos`).
- **Videos of SmolVLM.** In a prompt a video is text with the number of its frames, its length and the time of each
  frame, and each frame is an image that is not split into tiles. transformers' processor writes this text. It renders
  chats with a video with its own chat template instead of the model's; rlkit's prompts are the same. The length is the
  number of frames divided by their rate. All videos of a row must have the same number of frames, because the processor
  stacks them. Called with images and videos, the processor loses the pixels of images; rlkit calls its parts and keeps
  them. Frames of files are chosen as for all families (`--video_fps`, `--video_frames`); the processor itself would
  take them from the first to the last frame, or leave out a second at both ends of long videos. vLLM has no videos of
  the family: rollout `vllm` gives it frames as images that the trainer has prepared. vLLM's servers refuse them.
- **qwen4_exp.** Queries attend to the blocks of tokens that an indexer chooses; there are also layers with the gated
  delta rule, and embeddings of the last tokens. In packed rows all three get each sequence as a row of its own.
  transformers 5.19 chooses the blocks in a Python loop over all tokens, so training is slow. The choice has no
  gradient: the indexer is not trained. The engine selects `sdpa` attention: with `eager`, padding on the left makes
  log-probabilities nan. Its GPU kernels, and vLLM, were not tested.
- **ernie4_5_vl_moe** has separate experts for text tokens and for the tokens of and around an image. The engine passes
  the type of each token to the model, as `moe_mm_token_type_ids`. Ranks cannot share a sequence, because image experts
  have no gradient on a rank without image tokens. Router replay is refused: its layers have two routers. vLLM 0.32
  reads the configuration (`embed_dim`, `moe_num_experts` as a list, ...) and the processor of the published remote code
  only; transformers needs a converted configuration. Rollout `vllm` refuses the family on a CPU.
- **glm5_next** (GLM-5.3-Flash) has layers that, like GLM-5's, attend to tokens that an indexer chooses (here in pools),
  and layers of linear attention. It has no position ids. In packed rows both kinds get each sequence as a row of its
  own. Frames of its videos consist of image tokens, between the brackets of a video. vLLM 0.32 needs settings that
  transformers' configuration lacks, such as `mhc` and `mla_use_nope`, so it cannot read an export without them. With
  them it loads the weights that rlkit sends; a run needs a GPU.
- **cohere_compass with vLLM.** With `mrope_section` [6, 6, 4], transformers 5.19 rotates the dimensions of a head by
  the frequencies 0, 2, ..., 10, 1, 3, ..., 11, 12, ..., 15, and vLLM 0.32 by 0, 1, ..., 15. The logprobs differ by 0.1
  in the tiny model, and by 5e-7 in one whose layers have no RoPE. rlkit refuses the family on a CPU; on a GPU
  `WeightSyncCheck` would stop such a run.
- **cosmos3_omni, cosmos3_edge** (the text-writing part of Cosmos 3). The first is Qwen3-VL by another name; the second
  has a vision tower of its own. A forward of Cosmos 3 Edge in transformers 5.19 without `attention_mask` mistakes image
  tokens for starts of packed sequences, because they share their first position id; logprobs of the tiny model then
  differ by 0.8. rlkit's engines and sampler do not. vLLM 0.32 knows neither in the form that transformers writes: it
  calls the first `Cosmos3ForConditionalGeneration`, and reads the layers of the second from `hybrid_override_pattern`
  of its published files; no run with them was tested.
- **MiniCPM-V 4.6.** Its processor numbers the images of a text. Images in the observations of an episode start from 0
  again, while vLLM counts them on.
- **SmolVLM.** transformers' processor needs the package `num2words`.
"""
    return HEAD + "\n".join(lines) + "\n" + more


if __name__ == "__main__":
    PAGE.write_text(page())
