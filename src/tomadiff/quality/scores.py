"""Scores of the pictures in a store, kept beside them so that nothing is computed twice."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..named import label
from .features import Clip, Dino, Inception, Lpips
from .job import REFERENCE, decode
from .metrics import Statistics, fid, psnr, ssim
from .store import Row, Store, append, read_rows
from .weights import NotAvailable


@dataclass(frozen=True)
class Wanted:
    """Which metrics, and with which models."""

    metrics: Sequence[str]
    clip_model: str | None = None
    dino_model: str | None = None
    fid_against: str = "dense"
    device: str = "cpu"

    def name_of(self, metric: str) -> str:
        """What a score is kept as: scores of different models are different scores."""
        model = {"clip": self.clip_model, "dino": self.dino_model}.get(metric)
        return f"{metric} of {model}" if model else metric


# of a picture, the dense one and the prompt
Score = Callable[[Tensor, Tensor, str], float]


def score(store: Store, wanted: Wanted) -> tuple[list[Row], dict[str, dict[str, float]], dict[str, str]]:
    """Rows with their scores; scores of whole sets, by label; and metrics that can't be had, with advice."""
    measures, unavailable = measures_of(wanted)
    kept = {(row["sha256"], row["dense"]): row for row in read_rows(store.folder / "scores.jsonl")}
    dense = {(key[0], key[1]): row for key, row in store.rows.items() if key[2:] == REFERENCE}
    rows = []
    for key, row in store.rows.items():
        reference = dense.get(key[:2])
        if reference is None:
            continue
        # the dense picture can't be compared with itself, only with its prompt
        useful = {
            name: measure for name, measure in measures.items() if row is not reference or name == "clip"
        }
        found = kept.get((row["sha256"], reference["sha256"]), {})
        names = {name: wanted.name_of(name) for name in useful}
        missing = {name: measure for name, measure in useful.items() if names[name] not in found}
        if missing:
            picture, other = decode(store.read(row))[None], decode(store.read(reference))[None]
            new = {names[name]: measure(picture, other, row["prompt"]) for name, measure in missing.items()}
            found = {**found, "sha256": row["sha256"], "dense": reference["sha256"], **new}
            append(store.folder / "scores.jsonl", found)
            print(f"scoring: {row['file']}", file=sys.stderr)
        rows.append({**row, **{name: found[names[name]] for name in useful}})
    sets: dict[str, dict[str, float]] = {}
    if "fid" in wanted.metrics:
        try:
            sets = fids(store, rows, wanted)
        except NotAvailable as error:
            unavailable["fid"] = str(error)
    return rows, sets, unavailable


def measures_of(wanted: Wanted) -> tuple[dict[str, Score], dict[str, str]]:
    """Functions for the metrics of single pictures, as far as their models can be had."""
    makers: dict[str, Callable[[], Score]] = {
        "psnr": lambda: lambda picture, dense, prompt: min(100.0, float(psnr(picture, dense))),
        "ssim": lambda: lambda picture, dense, prompt: float(ssim(picture, dense)),
        "lpips": lambda: _pair(Lpips(device=wanted.device).load()),
        "dino": lambda: _pair(Dino(wanted.dino_model, wanted.device).load()),
        "clip": lambda: _text(Clip(wanted.clip_model, wanted.device).load()),
    }
    measures, unavailable = {}, {}
    for name in wanted.metrics:
        if name in makers:
            try:
                measures[name] = makers[name]()
            except NotAvailable as error:
                unavailable[name] = str(error)
    return measures, unavailable


def fids(store: Store, rows: Sequence[Row], wanted: Wanted) -> dict[str, dict[str, float]]:
    """The FID of each way's pictures, against the dense ones or real ones."""
    inception = Inception(wanted.device).load()
    features = inception_features(store, rows, inception)
    files: dict[tuple[str, float], list[str]] = {}
    for row in rows:
        files.setdefault((row["way"], row["ratio"]), []).append(row["sha256"])
    against_dense = wanted.fid_against == "dense"
    if len(files[REFERENCE]) < 2:
        return {}

    def statistics(way: tuple[str, float]) -> Statistics:
        return Statistics.of([torch.stack([features[sha256] for sha256 in files[way]])])

    reference = statistics(REFERENCE) if against_dense else inception.statistics(Path(wanted.fid_against))
    return {
        label(*way): {"fid": fid(statistics(way), reference)}
        for way in files
        if len(files[way]) > 1 and (way != REFERENCE or not against_dense)
    }


def inception_features(store: Store, rows: Sequence[Row], inception: Inception) -> dict[str, Tensor]:
    """Of every picture, by its checksum; kept, since they take longer than all the rest."""
    file = store.folder / "inception.jsonl"
    features = {row["sha256"]: _unpack(row["features"]) for row in read_rows(file)}
    for row in rows:
        if row["sha256"] not in features:
            found = inception(decode(store.read(row))[None])[0]
            append(file, {"sha256": row["sha256"], "features": _pack(found)})
            features[row["sha256"]] = found
    return features


def _pack(features: Tensor) -> str:
    return base64.b64encode(features.float().numpy().tobytes()).decode()


def _unpack(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)


def _pair(model: Any) -> Score:
    return lambda picture, dense, prompt: float(model(picture, dense))


def _text(model: Any) -> Score:
    return lambda picture, dense, prompt: float(model(picture, [prompt]))
