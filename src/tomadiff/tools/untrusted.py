"""Check that a model's files name only installed classes and bring no code of their own.

This comes before anything is loaded, since these files tell diffusers and transformers what to import and
run. SECURITY.md says what else is trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
from diffusers import DiffusionPipeline, ModelMixin

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


class UntrustedModelError(ValueError):
    """A model that brings its own code, or names unknown libraries or classes."""


def check_pipeline(folder: Path) -> type[DiffusionPipeline]:
    """The class of the pipeline in a folder, after checking that no file in it can run code."""
    index = read_object(folder / INDEX)
    pipeline = check_index(index, folder / INDEX)
    if pipeline._load_connected_pipes and (folder / "README.md").exists():
        raise UntrustedModelError(f"{folder}/README.md may name another pipeline to load; {ALLOW}")
    check_files(folder)
    for name, kind in _components(index, folder / INDEX):
        if issubclass(kind, DiffusionPipeline):
            check_pipeline(folder / name)
        elif (folder / name).is_dir():
            check_files(folder / name)
            check_weights(folder / name)
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
        raise ValueError(f"{folder} holds {found}, which is no model of diffusers")
    check_files(folder)
    check_weights(folder)
    return kind


def check_files(folder: Path) -> None:
    """Refuse Python files, and configs that ask for code."""
    for path in sorted(folder.glob("*.py")):
        raise UntrustedModelError(f"{path} is Python code that comes with the model; {ALLOW}")
    for path in sorted(folder.glob("*config.json")):
        for key, value in _entries(read_object(path)):
            # a slash means a kernel from the Hub, owner/name
            kernel = key.endswith(("_implementation", "_implementation_internal")) and "/" in str(value)
            if kernel or (key in CODE_KEYS and value):
                raise UntrustedModelError(f"{path} asks for code from elsewhere by {key!r}; {ALLOW}")


def check_weights(folder: Path) -> None:
    """Refuse pickled weights, unless there are safetensors to load instead."""
    for path in sorted(path for path in folder.iterdir() if path.suffix in PICKLES):
        if not any(folder.glob("*.safetensors")):
            raise UntrustedModelError(f"{path} is a pickle, and there is no .safetensors beside it; {ALLOW}")


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
        yield name, _class(_library(value[0], where), value[1], where)


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
        raise ValueError(f"{where} names {name}, and this {library.__name__} has no such class: update it")
    return found


def _entries(content: Any) -> Iterator[tuple[str, Any]]:
    """All keys and values, at any depth."""
    if isinstance(content, dict):
        yield from content.items()
        content = list(content.values())
    for part in content if isinstance(content, list) else ():
        yield from _entries(part)
