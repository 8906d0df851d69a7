"""Check that a model's files name only installed classes and bring no code of their own.

This comes before anything is loaded, since these files tell diffusers and transformers what to import and
run. SECURITY.md says what else is trusted.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
from diffusers import BaseGuidance, DiffusionPipeline, ModelMixin, SchedulerMixin

from tomadiff.runtime.files import parse_json

from .demo import codec, text
from .demo.pipelines import PIPELINES

ALLOW = "if you trust whoever made it, add --trust-remote-code"
EMBEDDED_CLASSES = {kind.__name__: kind for kind in PIPELINES.values()}
OWN_LIBRARIES = {module.__name__: module for module in (codec, text)}
INDEX = "model_index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# config keys that make transformers run code from a repository
CODE_KEYS = ("auto_map", "trust_remote_code")
# config keys that make transformers read another configuration, other weights or another model
ELSEWHERE_KEYS = ("configuration_files", "transformers_weights", "audio_tokenizer_name_or_path")
ADAPTER = "adapter_config.json"  # makes transformers load the model that it names instead


class UntrustedModelError(ValueError):
    """A model that brings its own code, or names unknown libraries or classes."""


def check_pipeline(folder: Path, part: type[DiffusionPipeline] | None = None) -> type[DiffusionPipeline]:
    """The class of the pipeline in a folder, after checking that no file in it can run code.

    part: the class as which it is loaded, if it is a part of another pipeline.
    """
    index = read_object(folder / INDEX)
    pipeline = check_index(index, folder / INDEX)
    connected = any(kind._load_connected_pipes for kind in (pipeline, part or pipeline))
    if connected and (folder / "README.md").exists():
        raise UntrustedModelError(f"{folder}/README.md may name another pipeline to load; {ALLOW}")
    check_files(folder)
    for name, kind in _components(index, folder / INDEX):
        if issubclass(kind, DiffusionPipeline):
            check_pipeline(folder / name, kind)
            continue
        for each in _folders_of(folder / name) or _folders_of(folder):  # diffusers looks there, too
            check_part(each, nested=part is not None)
    return pipeline


def check_index(index: dict[str, Any], where: Any) -> type[DiffusionPipeline]:
    """The class of a pipeline, after checking that all classes in its index are known."""
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise UntrustedModelError(
            f"{where} names {name!r} as its pipeline, which is code of its own; {ALLOW}"
        )
    pipeline = EMBEDDED_CLASSES.get(name) or _class(diffusers, name, where)
    if not issubclass(pipeline, DiffusionPipeline):
        raise ValueError(f"{where} names {name} as its pipeline, and that is none")
    for _ in _components(index, where):
        pass
    return pipeline


def check_model(folder: Path) -> type[ModelMixin]:
    """The class of the single model in a folder, after checking that no file in it can run code."""
    config = read_object(folder / "config.json")
    name = config.get("_class_name")
    kind = _class(diffusers, name, folder / "config.json") if isinstance(name, str) else object
    if not issubclass(kind, ModelMixin):
        found = name or config.get("architectures", "something")  # transformers' key for it
        raise ValueError(f"{folder} holds {found!r}, which is no model of diffusers")
    for each in _folders_of(folder):
        check_part(each)
    return kind


def check_part(folder: Path, nested: bool = False) -> None:
    """Check the folder of a part, and those in it, where processors keep parts of their own.

    nested: whether it belongs to a pipeline in a pipeline, to whose parts diffusers doesn't pass on that
    pickles are not wanted.
    """
    check_files(folder)
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            check_files(path)
    if nested or not any(folder.glob("*.safetensors")):
        refuse_pickles(folder)


def check_files(folder: Path) -> None:
    """Refuse Python files, and JSON that asks for code or leads to files that were not checked."""
    for path in sorted(folder.glob("*.py")):
        raise UntrustedModelError(f"{path} is Python code that comes with the model; {ALLOW}")
    if (folder / ADAPTER).exists():
        raise UntrustedModelError(f"{folder / ADAPTER} may name another model to load; {ALLOW}")
    for path in sorted(folder.glob("*config.json")):
        for key, value in _entries(read_object(path)):
            # a slash means a kernel from the Hub, owner/name
            kernel = key.endswith(("_implementation", "_implementation_internal")) and "/" in str(value)
            if kernel or (key in CODE_KEYS and value):
                raise UntrustedModelError(f"{path} asks for code from elsewhere by {key!r}; {ALLOW}")
            if key in ELSEWHERE_KEYS and value:
                raise UntrustedModelError(f"{path} names something else to load by {key!r}; {ALLOW}")
    for path in sorted(folder.glob("*.safetensors.index.json")):
        check_shards(path)


def check_shards(index: Path) -> None:
    """Refuse an index of weights that names anything but safetensors beside it."""
    shards = read_object(index).get("weight_map")
    for name in shards.values() if isinstance(shards, dict) else [shards]:
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise UntrustedModelError(f"{index} names {name!r}, which is no .safetensors beside it; {ALLOW}")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index} names {name!r}, and there is no such file beside it")


def refuse_pickles(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLES or path.name.endswith(".bin.index.json"):
            raise UntrustedModelError(f"{path} is a pickle, or names some, and would be loaded; {ALLOW}")


def read_object(path: Path) -> dict[str, Any]:
    content = parse_json(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"{path} has no JSON object in it")
    return content


def _components(index: dict[str, Any], where: Any) -> Iterator[tuple[str, type]]:
    """The components of a pipeline, with their classes."""
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or not any(isinstance(v, str) for v in value):
            continue  # a setting, or a component that is left out
        if len(value) != 2 or not all(isinstance(part, str) for part in value) or not name.isidentifier():
            raise UntrustedModelError(f"{where} has a part {name!r} that is no library and class: {value!r}")
        kind = _class(_library(value[0], where), value[1], where)
        if not issubclass(kind, _kinds()):
            raise UntrustedModelError(
                f"{where} names {value[1]} as {name!r}, which is none of the kinds of parts that pipelines "
                f"have: models, schedulers, tokenizers and the like; {ALLOW}"
            )
        yield name, kind


@functools.cache
def _kinds() -> tuple[type, ...]:
    """What pipelines are made of. Others, such as AutoPipeline, load classes that nobody checked."""
    ours = (ModelMixin, SchedulerMixin, DiffusionPipeline, BaseGuidance)
    try:
        import transformers
    except ImportError:
        return ours
    theirs = (transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase, transformers.ProcessorMixin)
    return (*ours, *theirs, transformers.FeatureExtractionMixin, transformers.ImageProcessingMixin)


def _folders_of(folder: Path) -> list[Path]:
    """A part's folder; and FOLDER_1, FOLDER_2, ... with further models of a MultiControlNetModel."""
    if not folder.is_dir():
        return []
    further = re.compile(re.escape(folder.name) + r"_\d+")
    beside = [path for path in folder.parent.iterdir() if path.is_dir() and further.fullmatch(path.name)]
    return [folder, *sorted(beside)]


def _library(name: str, where: Any) -> ModuleType:
    """A module that classes may come from: diffusers, transformers, diffusers.pipelines.*, our own two."""
    if name == "diffusers":
        return diffusers
    if name == "transformers":
        try:
            import transformers
        except ImportError as error:
            raise ImportError("this model needs transformers: pip install transformers") from error
        return transformers
    if name in OWN_LIBRARIES:
        return OWN_LIBRARIES[name]
    found = getattr(diffusers.pipelines, name, None) if name.isidentifier() else None
    if isinstance(found, ModuleType) and found.__name__ == f"diffusers.pipelines.{name}":
        return found
    raise UntrustedModelError(
        f"{where} names {name!r}, which is none of the libraries that models are made of; {ALLOW}"
    )


def _class(library: ModuleType, name: str, where: Any) -> type:
    renamed = {"CLIPFeatureExtractor": "CLIPImageProcessor"}  # diffusers does the same for old pipelines
    found = getattr(library, renamed.get(name, name), None)
    if not isinstance(found, type) or not hasattr(found, "from_pretrained"):
        raise ValueError(f"{where} names {name!r}, and this {library.__name__} has no such class: update it")
    if ".dummy_" in found.__module__:  # a stand-in for a class whose packages are missing
        found()  # raises an error that names them
    return found


def _entries(content: Any) -> Iterator[tuple[str, Any]]:
    """All keys and values, at any depth."""
    if isinstance(content, dict):
        yield from content.items()
        content = list(content.values())
    for part in content if isinstance(content, list) else ():
        yield from _entries(part)
