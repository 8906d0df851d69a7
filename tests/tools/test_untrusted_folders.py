"""Nothing in a model's folder runs unless the user says so, and what is harmless loads."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import huggingface_hub
import pytest
import torch
from diffusers.utils import dummy_torch_and_scipy_objects, import_utils
from packaging.version import Version
from PIL import Image
from pipelines import make, whole_pipeline

from tomadiff.tools import cli
from tomadiff.tools.loading import load, load_model
from tomadiff.tools.ui.studio import Studio
from tomadiff.tools.untrusted import check_index, check_pipeline

ROOT = Path(__file__).parents[2]
Attack = Callable[[Path, "Trap"], str]  # what should be said to it


class Trap:
    """Code that leaves a file where it ran, in several places of a model's folder."""

    def __init__(self, folder: Path) -> None:
        self.sprung = folder / "sprung"
        self.code = f"open({str(self.sprung)!r}, 'w').close()\n"

    def __reduce__(self) -> Any:  # when it is unpickled
        return exec, (self.code,)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_pipeline(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trap:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whoever asks gets consent
    return Trap(tmp_path)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def custom_pipeline(folder: Path, trap: Trap) -> str:
    (folder / "evil.py").write_text(trap.code)
    change(folder / "model_index.json", _class_name=["evil", "Evil"])
    return "as its pipeline, which is code of its own"


def community_pipeline(folder: Path, trap: Trap) -> str:
    change(folder / "model_index.json", _class_name=["lpw_stable_diffusion", "Pipeline"])
    return "as its pipeline, which is code of its own"


def custom_component(folder: Path, trap: Trap) -> str:
    (folder / "unet" / "evil.py").write_text(trap.code)
    change(folder / "model_index.json", unet=["evil", "Evil"])
    return "'evil', which is none of the libraries"


def python_file(folder: Path, trap: Trap) -> str:
    (folder / "unet" / "diffusers.py").write_text(trap.code)
    return "diffusers.py is Python code that comes with the model"


def installed_module(folder: Path, trap: Trap) -> str:
    (trap.sprung.parent / "innocent.py").write_text(trap.code)
    change(folder / "model_index.json", unet=["innocent", "Evil"])
    return "'innocent', which is none of the libraries"


def module_in_use(folder: Path, trap: Trap) -> str:
    change(folder / "model_index.json", unet=["subprocess", "Popen"])
    return "'subprocess', which is none of the libraries"


def function_of_a_library(folder: Path, trap: Trap) -> str:
    change(folder / "model_index.json", unet=["transformers", "pipeline"])
    return "has no such class"


def pipeline_in_a_pipeline(folder: Path, trap: Trap) -> str:
    inner = folder / "unet"
    (inner / "evil.py").write_text(trap.code)
    (inner / "model_index.json").write_text(json.dumps({"_class_name": ["evil", "Evil"]}))
    change(folder / "model_index.json", unet=["diffusers", "StableDiffusionPipeline"])
    return "as its pipeline, which is code of its own"


def pickled_weights(folder: Path, trap: Trap) -> str:
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    torch.save({"weight": trap}, folder / "unet" / "diffusion_pytorch_model.bin")
    return "is a pickle"


def automatic_class(folder: Path, trap: Trap) -> str:
    change(folder / "text_encoder" / "config.json", auto_map={"AutoModel": "evil--evil.Evil"})
    return "asks for code from elsewhere by 'auto_map'"


def consent_in_a_file(folder: Path, trap: Trap) -> str:
    change(folder / "text_encoder" / "config.json", text_config={"trust_remote_code": True})
    return "by 'trust_remote_code'"


def kernel_from_the_hub(folder: Path, trap: Trap) -> str:
    change(folder / "text_encoder" / "config.json", _attn_implementation_internal="evil/kernel")
    return "by '_attn_implementation_internal'"


def folder_elsewhere(folder: Path, trap: Trap) -> str:
    change(folder / "model_index.json", **{"../unet": ["diffusers", "UNet2DConditionModel"]})
    return "is no library and class"


def whole_inside(folder: Path, kind: list[str]) -> Path:
    """A copy of the pipeline in the place of its UNet."""
    inner = Path(shutil.copytree(folder, folder.parent / "inner"))
    shutil.rmtree(folder / "unet")
    change(folder / "model_index.json", unet=kind)
    return inner.rename(folder / "unet")


def automatic_pipeline(folder: Path, trap: Trap) -> str:
    inner = whole_inside(folder, ["auto_pipeline", "AutoPipelineForText2Image"])
    installed_module(inner, trap)
    return "which is none of the kinds of parts"


def automatic_model(folder: Path, trap: Trap) -> str:
    change(folder / "unet" / "config.json", _class_name="Evil", auto_map={"AutoModel": "evil.Evil"})
    change(folder / "model_index.json", unet=["diffusers", "AutoModel"])
    return "which is none of the kinds of parts"


def shards_elsewhere(folder: Path, trap: Trap) -> str:
    (folder / "text_encoder" / "model.safetensors").rename(folder / "text_encoder" / "decoy.safetensors")
    torch.save({"weight": trap}, folder.parent / "shard.bin")
    shards = {"weight_map": {"text_model.final_layer_norm.bias": "../../shard.bin"}}
    (folder / "text_encoder" / "model.safetensors.index.json").write_text(json.dumps(shards))
    return "names '../../shard.bin', which is no .safetensors beside it"


def pickled_shards(folder: Path, trap: Trap) -> str:
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.rename(folder / "unet" / "decoy.safetensors")
    torch.save({"weight": trap}, folder / "unet" / "shard")
    weights.with_name(weights.name + ".index.json").write_text('{"weight_map": {"conv_in.weight": "shard"}}')
    return "names 'shard', which is no .safetensors beside it"


def pickle_in_a_pipeline_in_a_pipeline(folder: Path, trap: Trap) -> str:
    inner = whole_inside(folder, ["diffusers", "StableDiffusionPipeline"]) / "unet"
    (inner / "diffusion_pytorch_model.safetensors").rename(inner / "decoy.safetensors")
    torch.save({"weight": trap}, inner / "diffusion_pytorch_model.bin")
    return "diffusion_pytorch_model.bin is a pickle"


def pickled_shards_in_a_pipeline_in_a_pipeline(folder: Path, trap: Trap) -> str:
    inner = whole_inside(folder, ["diffusers", "StableDiffusionPipeline"]) / "text_encoder"
    (inner / "model.safetensors").rename(inner / "decoy.safetensors")
    torch.save({"weight": trap}, inner / "shard")
    (inner / "pytorch_model.bin.index.json").write_text('{"weight_map": {"weight": "shard"}}')
    return "pytorch_model.bin.index.json is a pickle, or names some"


def connected_pipeline(folder: Path, trap: Trap) -> str:
    inner = whole_inside(folder, ["diffusers", "KandinskyV22CombinedPipeline"])
    (inner / "README.md").write_text("---\nprior: [evil/prior]\n---\n")
    return "README.md may name another pipeline"


def other_configuration(folder: Path, trap: Trap) -> str:
    config = json.loads((folder / "text_encoder" / "config.json").read_text())
    asks = config | {"_attn_implementation_internal": "evil/kernel"}
    (folder / "text_encoder" / "config.4.0.0.json").write_text(json.dumps(asks))
    change(folder / "text_encoder" / "config.json", configuration_files=["config.4.0.0.json"])
    return "by 'configuration_files'"


def other_weights(folder: Path, trap: Trap) -> str:
    torch.save({"weight": trap}, folder / "text_encoder" / "adapter_model.bin")
    change(folder / "text_encoder" / "config.json", transformers_weights="adapter_model.bin")
    return "by 'transformers_weights'"


def other_model(folder: Path, trap: Trap) -> str:
    other = Path(shutil.copytree(folder / "text_encoder", folder.parent / "other"))
    change(other / "config.json", _attn_implementation_internal="evil/kernel")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(other), "target_modules": ["q_proj"]}
    (folder / "text_encoder" / "adapter_config.json").write_text(json.dumps(adapter))
    return "adapter_config.json may name another model"


def other_tokenizer(folder: Path, trap: Trap) -> str:
    named = {"audio_tokenizer_class": "DacModel", "audio_tokenizer_name_or_path": "evil/tokenizer"}
    (folder / "tokenizer" / "processor_config.json").write_text(json.dumps({"audio_tokenizer": named}))
    return "by 'audio_tokenizer_name_or_path'"


def part_of_a_processor(folder: Path, trap: Trap) -> str:
    (folder / "tokenizer" / "second").mkdir()
    asks = {"auto_map": {"AutoTokenizer": ["evil--evil.Evil", None]}}
    (folder / "tokenizer" / "second" / "tokenizer_config.json").write_text(json.dumps(asks))
    return "asks for code from elsewhere by 'auto_map'"


def second_controlnet(folder: Path, trap: Trap) -> str:
    shutil.copytree(folder / "unet", folder / "unet_1")
    (folder / "unet_1" / "evil.py").write_text(trap.code)
    return "unet_1/evil.py is Python code"


ATTACKS = [
    custom_pipeline,
    community_pipeline,
    custom_component,
    python_file,
    installed_module,
    module_in_use,
    function_of_a_library,
    pipeline_in_a_pipeline,
    pickled_weights,
    automatic_class,
    consent_in_a_file,
    kernel_from_the_hub,
    folder_elsewhere,
    automatic_pipeline,
    automatic_model,
    shards_elsewhere,
    pickled_shards,
    pickle_in_a_pipeline_in_a_pipeline,
    pickled_shards_in_a_pipeline_in_a_pipeline,
    connected_pipeline,
    other_configuration,
    other_weights,
    other_model,
    other_tokenizer,
    part_of_a_processor,
    second_controlnet,
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_in_a_folder_runs(
    attack: Attack, folder: Path, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder.parent)
    said = attack(folder, trap)
    with pytest.raises(ValueError, match=r"(won't|can't) load") as refusal:
        load(str(folder))
    assert said in str(refusal.value) and not trap.sprung.exists()


def test_names_in_a_folder_do_not_reach_the_terminal_as_they_are(folder: Path) -> None:
    file = folder / "unet" / "\x1b[2J.py"
    file.write_text("")
    for said in (r"\x1b[2J.py is Python code", r"names '\x1b]0;evil\x07'"):
        with pytest.raises(ValueError, match="load") as refusal:
            load(str(folder))
        assert said in str(refusal.value) and str(refusal.value).isprintable()
        change(folder / "model_index.json", unet=["diffusers", "\x1b]0;evil\x07"])


CLASSES = {
    "StableDiffusionPipeline": {
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "feature_extractor": ["transformers", "CLIPFeatureExtractor"],
        "image_encoder": [None, None],
        "requires_safety_checker": True,
    },
    "StableDiffusionXLPipeline": {
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "image_encoder": ["transformers", "CLIPVisionModelWithProjection"],
        "scheduler": ["diffusers", "EulerDiscreteScheduler"],
        "vae": ["diffusers", "AutoencoderKL"],
    },
    "FluxPipeline": {
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    },
    "WanImageToVideoPipeline": {
        "image_encoder": ["transformers", "CLIPVisionModel"],
        "image_processor": ["transformers", "CLIPImageProcessor"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "transformer_2": [None, None],
        "boundary_ratio": None,
    },
    "HunyuanVideo15Pipeline": {"guider": ["diffusers", "ClassifierFreeGuidance"]},
    "QwenImageEditPipeline": {
        "processor": ["transformers", "Qwen2VLProcessor"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    },
}


@pytest.mark.parametrize("name", CLASSES)
def test_parts_of_well_known_models_are_welcome(name: str) -> None:
    assert check_index({"_class_name": name, **CLASSES[name]}, name).__name__ == name


def test_weights_in_several_files_and_a_pipeline_in_a_pipeline_are_welcome(folder: Path) -> None:
    pipe = load(str(folder))
    for name in ("unet", "text_encoder"):
        shutil.rmtree(folder / name)
        getattr(pipe, name).save_pretrained(folder / name, max_shard_size="20KB")
        assert list((folder / name).glob("*.safetensors.index.json"))
    (folder / "unet" / "diffusion_pytorch_model.bin.index.json").write_text(
        "{}"
    )  # a hub's, without its files
    assert load(str(folder)).unet.config == pipe.unet.config
    (folder / "unet" / "diffusion_pytorch_model.bin.index.json").unlink()
    whole_inside(folder, ["diffusers", "StableDiffusionPipeline"])
    assert check_pipeline(folder).__name__ == "StableDiffusionPipeline"


def test_a_file_of_weights_that_is_missing_is_told(folder: Path) -> None:
    index = folder / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text('{"weight_map": {"conv_in.weight": "gone.safetensors"}}')
    with pytest.raises(ValueError, match=r"names 'gone\.safetensors', and there is no such file") as error:
        load(str(folder))
    assert "trust" not in str(error.value)


def test_a_package_that_a_part_needs_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = dummy_torch_and_scipy_objects.LMSDiscreteScheduler
    monkeypatch.setattr(diffusers, "LMSDiscreteScheduler", stand_in)
    monkeypatch.setattr(import_utils, "_scipy_available", False)
    change(folder / "model_index.json", scheduler=["diffusers", "LMSDiscreteScheduler"])
    with pytest.raises(ImportError, match="scipy"):
        load(str(folder))


def test_whoever_trusts_a_folder_says_so(
    folder: Path, trap: Trap, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "evil.py").write_text(
        trap.code
        + "from diffusers import StableDiffusionPipeline\nclass Evil(StableDiffusionPipeline): pass\n"
    )
    change(folder / "model_index.json", _class_name=["evil", "Evil"])
    output = folder.parent / "x.png"
    command = ["generate", "fox", "--model", str(folder), "--steps", "1", "--size", "128", "128"]
    assert cli.main([*command, "-o", str(output)]) == 2
    assert "add --trust-remote-code" in capsys.readouterr().err and not trap.sprung.exists()
    assert cli.main([*command, "-o", str(output), "--trust-remote-code"]) == 0
    assert trap.sprung.exists() and Image.open(output).size == (128, 128)


def test_trust_in_the_pages_own_model_is_none_in_what_the_page_chooses(folder: Path, trap: Trap) -> None:
    custom_component(folder, trap)
    studio = Studio("emoji-flux", trust_remote_code=True)
    with pytest.raises(ValueError, match="won't load"):
        studio.use_model(str(folder), "somebody")
    assert not trap.sprung.exists() and studio.model == "emoji-flux"


@pytest.mark.parametrize("name", ["emoji-unet", "emoji-flux"])
def test_a_saved_copy_of_an_embedded_pipeline_is_a_model_too(name: str, tmp_path: Path) -> None:
    original = load(name)
    original.save_pretrained(tmp_path / "copy")
    for trusting in (False, True):
        copy = load(str(tmp_path / "copy"), trust_remote_code=trusting)
        assert type(copy) is type(original)
        weights = dict(copy.text_encoder.named_parameters())
        for key, weight in original.text_encoder.named_parameters():
            assert torch.equal(weights[key], weight)


def test_a_model_alone_is_checked_too(tmp_path: Path, trap: Trap) -> None:
    make("sd1").unet.save_pretrained(tmp_path / "unet")
    assert load_model(tmp_path / "unet", "cpu", "fp32").config.sample_size
    (tmp_path / "unet" / "evil.py").write_text(trap.code)
    change(tmp_path / "unet" / "config.json", auto_map={"AutoModel": "evil.Evil"})
    with pytest.raises(ValueError, match="is Python code"):
        load_model(tmp_path / "unet", "cpu", "fp32")
    assert not trap.sprung.exists()


@pytest.mark.parametrize("attack", [custom_component, pickled_weights, shards_elsewhere, automatic_pipeline])
def test_files_from_the_hub_are_checked_before_they_are_used(
    attack: Attack,
    folder: Path,
    trap: Trap,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was downloaded before is in a cache, from which it is taken where the hub is out of reach."""
    commit, cached = "0" * 40, tmp_path / "hub" / "models--some--body"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    shutil.copytree(folder, cached / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load("some/body").unet.config.sample_size
    said = attack(cached / "snapshots" / commit, trap)
    with pytest.raises(ValueError, match="won't load 'some/body'") as refusal:
        load("some/body")
    assert said in str(refusal.value) and not trap.sprung.exists()


def versions(file: str, line: str) -> dict[str, Version]:
    found = re.findall(line, (ROOT / file).read_text(), re.MULTILINE)
    return {name: Version(version) for name, version in found}


def test_the_oldest_versions_are_those_that_are_tried_and_written_down() -> None:
    pin = r"^([\w-]+)==([\d.]+)"
    allowed = versions("pyproject.toml", r'"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)')
    oldest = versions("constraints-oldest.txt", pin)
    said = versions("SECURITY.md", r"^\| ([\w-]+) \| ([\d.]+) \| [A-Z]")
    assert oldest.keys() >= {"torch", "diffusers", "transformers"} and said.keys() > {"torch", "ray"}
    assert oldest == {name: allowed[name] for name in oldest}
    assert said == {name: allowed[name] for name in said}
    tried = versions("constraints.txt", pin) | oldest
    assert said == {name: tried[name] for name in said}, "by `make test`, if not by `make test-oldest`"
