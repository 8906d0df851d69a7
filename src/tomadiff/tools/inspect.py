"""Find the transformer blocks of an unknown model, their tokens and share of the time, by calling it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tomadiff.errors import UnsupportedModelError
from tomadiff.models import Call, Family, family_of
from tomadiff.models.custom import lists_of_blocks
from tomadiff.runtime.hook import parameter_names
from tomadiff.runtime.machine import wait_for

MIN_LAYERS = 3  # a module with fewer linear layers is no transformer block
TABLES = ("rot", "rope", "freqs", "pos")  # an argument with one of these in its name has rotary tables
CALLS, ENOUGH = 5, 5.0  # the most calls that are timed, and the seconds after which no more are
TIMES = ("timestep", "timesteps", "sigma", "time", "t")  # usual names of the argument with the timestep


@dataclass
class Candidate:
    """Module lists with blocks of one class and signature: their inputs, outputs and time."""

    block: str  # class name
    tokens: int  # length of the sequence
    argument: str  # the argument with the tokens
    output: int  # index of the tokens in what a block returns
    tables: dict[str, str]  # arguments that look like rotary tables, with the code that declares them
    others: dict[str, str]  # other per-token arguments, with the code that declares them
    unclear: tuple[str, ...]  # arguments with entries for image and text tokens, in unknown order
    lists: list[str] = field(default_factory=list)  # names of the module lists
    blocks: int = 0  # number of blocks that ran
    of: int = 0  # number of blocks at full depth
    seconds: float = 0.0  # time in all blocks
    spans: bool = True  # each block's input is the very tensor that the previous block returned


@dataclass
class Inspection:
    model: nn.Module
    call: Call
    candidates: list[Candidate]
    seconds: float  # time of the whole call
    family: Family | None

    def share(self, candidate: Candidate) -> float:
        """The candidate's share of a call's time, at full depth."""
        deeper = {id(each): each.seconds * each.of / each.blocks for each in self.candidates}
        total = self.seconds + sum(deeper.values()) - sum(each.seconds for each in self.candidates)
        return deeper[id(candidate)] / total

    def deepen(self, full: nn.Module) -> None:
        """Extrapolate to the depth of `full`, the same model with all its blocks."""
        lists = lists_of_blocks(full)
        for candidate in self.candidates:
            candidate.of = sum(len(lists[name]) for name in candidate.lists)

    def __str__(self) -> str:
        lines = [f"{type(self.model).__name__}: {self.seconds:.2f} s a call", *_table(self)]
        if self.family is not None:
            lines.append(f"tomadiff.apply knows it: {self.family}")
        elif not self.candidates:
            lines.append("no list of blocks takes tokens, [B, S, C], and returns as many: nothing to merge")
        else:
            lines.append("no family has it; to merge where most of the time goes:")
            lines += [f"    {line}" for line in self.advice(max(self.candidates, key=self.share))]
        return "\n".join(lines)

    def advice(self, candidate: Candidate) -> list[str]:
        """The call of `apply` to use, with comments on what to check first."""
        grid, text = guess_grid(self.call, candidate.tokens)
        lists = candidate.lists[0] if len(candidate.lists) == 1 else tuple(candidate.lists)
        said = {
            "blocks": repr(lists),
            "tokens": repr(candidate.argument),
            "output": str(candidate.output),
            "rotary": next(iter(candidate.tables.values()), "None"),
            "grid": grid or "(ROWS, COLUMNS)",
        }
        follows = [*list(candidate.tables.values())[1:], *candidate.others.values()]
        said |= {"follows": " + ".join(follows)} if follows else {}
        said |= {"text": "'first'"} if text else {}
        said |= {"spans": "True"} if candidate.spans and candidate.blocks > 1 else {}
        time = next((name for name in TIMES if name in parameter_names(self.model)), None)
        said |= {} if time == "timestep" else {"time": repr(time)}
        sites = ", ".join(f"{name}={code}" for name, code in said.items())
        lines = [f"tomadiff.apply(model, ratio=0.5, sites=tomadiff.Sites({sites}))"]
        if grid is None:
            lines.append(f"# with the rows and columns of its {candidate.tokens} tokens")
        if text:
            lines.append(
                f"# {text} of its {candidate.tokens} tokens look like text: 'last', if it comes behind"
            )
        if "PerTokenArg(" in sites:
            lines.insert(0, "from tomadiff.models import PerTokenArg")
        if candidate.unclear:
            unclear = ", ".join(candidate.unclear)
            lines.append(f"# entries for text and tokens are in {unclear}: say where with follows, see Sites")
        return lines


def inspect_call(model: nn.Module, *args: Any, **kwargs: Any) -> Inspection:
    """Run a model, unchanged, and record inputs, outputs and times of its blocks.

    It is called at least twice, and up to five times if that is quick. The fastest call counts: the first one
    warms up, and other processes can only slow a call down.
    """
    call = dict(zip(parameter_names(model), args)) | kwargs
    device = next((part.device for part in model.parameters()), torch.device("cpu"))
    timed: list[tuple[float, list[_Run]]] = []
    while len(timed) < 2 or (len(timed) < CALLS and sum(seconds for seconds, _ in timed) < ENOUGH):
        with torch.no_grad(), _watched(model, device) as found:
            start = _now(device)
            model(**call)
            timed.append((_now(device) - start, found))
    seconds, found = min(timed, key=lambda each: each[0])
    try:
        family = family_of(model)
    except UnsupportedModelError:
        family = None
    return Inspection(model, call, _outermost(found), seconds, family)


@dataclass
class _Run:
    """One call of one block."""

    list: str
    name: str
    start: float
    seconds: float = 0.0
    key: tuple[Any, ...] = ()  # blocks with equal keys belong to one candidate
    entries: tuple[Any, ...] = ()
    follows: bool = False  # its input is the very tensor that the previous block returned


@contextmanager
def _watched(model: nn.Module, device: torch.device) -> Iterator[list[_Run]]:
    runs: list[_Run] = []
    open_runs: dict[nn.Module, _Run] = {}
    last: dict[str, Tensor] = {}  # for each list, the tokens that its most recent block returned

    def before(list_name: str, name: str) -> Callable[..., None]:
        def look(block: nn.Module, args: tuple, kwargs: Call) -> None:
            open_runs[block] = _Run(list_name, name, _now(device))

        return look

    def after(block: nn.Module, args: tuple, kwargs: Call, output: Any) -> None:
        run = open_runs.pop(block)
        run.seconds = _now(device) - run.start
        call = dict(zip(parameter_names(block), args)) | kwargs
        back = output if isinstance(output, tuple) else (output,)
        fits = [
            (x.shape[1], argument, place)
            for argument, x in call.items()
            for place, y in enumerate(back)
            if isinstance(x, Tensor) and isinstance(y, Tensor) and x.ndim == 3 and x.shape == y.shape
        ]
        if fits:
            tokens, argument, place = max(fits, key=lambda fit: fit[0])
            run.key = (type(block).__name__, tokens, argument, place)
            run.entries = _entries(call, argument)
            run.follows = call[argument] is last.get(run.list)
            last[run.list] = back[place]
            runs.append(run)

    handles = []
    for list_name, blocks in lists_of_blocks(model).items():
        if sum(isinstance(part, nn.Linear) for part in blocks[0].modules()) < MIN_LAYERS:
            continue
        for number, block in enumerate(blocks):
            name = f"{list_name}.{number}"
            handles.append(block.register_forward_pre_hook(before(list_name, name), with_kwargs=True))
            handles.append(block.register_forward_hook(after, with_kwargs=True))
    try:
        yield runs
    finally:
        for handle in handles:
            handle.remove()


def _outermost(runs: list[_Run]) -> list[Candidate]:
    """Candidates from blocks that are not inside other blocks, grouped by key."""
    names = {run.name for run in runs}
    found: dict[tuple, Candidate] = {}
    for run in runs:
        if any(run.name.startswith(f"{name}.") for name in names):
            continue
        candidate = found.setdefault(run.key, Candidate(*run.key, *run.entries))
        candidate.blocks += 1
        candidate.of += 1
        candidate.seconds += run.seconds
        if run.list in candidate.lists:
            candidate.spans &= run.follows
        else:
            candidate.lists.append(run.list)
    return list(found.values())


def _entries(call: Call, argument: str) -> tuple[dict[str, str], dict[str, str], tuple[str, ...]]:
    """Per-token arguments: rotary tables, others, and those that also have entries for text."""
    tokens = call[argument].shape[1]
    beside = {x.shape[1] for x in call.values() if isinstance(x, Tensor) and x.ndim == 3}
    with_text = {tokens + text for text in beside if text < tokens}
    tables: dict[str, str] = {}
    others: dict[str, str] = {}
    unclear: list[str] = []
    for name, value in call.items():
        parts = value if isinstance(value, (tuple, list)) else [value]
        shapes = [(axis, x) for x in parts if isinstance(x, Tensor) for axis in _axes(x)]
        axes = {(axis, x.ndim) for axis, x in shapes if x.shape[axis] in {tokens, *with_text}}
        if not axes or name == argument:
            continue
        rows = " ".join(f"PerTokenArg({name!r}, axis={axis}, ndim={ndim})," for axis, ndim in sorted(axes))
        if any(part in name for part in TABLES):
            usual = all(axis == min(ndim - 2, 1) for axis, ndim in axes)  # the axes that Sites assumes
            tables[name] = repr(name) if usual and not tables else f"({rows})"
        elif any(x.shape[axis] == tokens for axis, x in shapes):
            others[name] = f"({rows})"
        else:
            unclear.append(name)
    return tables, others, tuple(unclear)


def _axes(x: Tensor) -> range:
    """Axes that could be the token axis. The last one only in masks: elsewhere it is the channels."""
    return range(x.ndim if x.ndim == 4 or x.dtype == torch.bool else x.ndim - 1)


def guess_grid(call: Call, tokens: int) -> tuple[str | None, int]:
    """Code that reads the grid from the model's arguments, and how many tokens would then be text."""
    lengths = {x.shape[1] for x in call.values() if isinstance(x, Tensor) and x.ndim == 3}
    for text in (0, *sorted(lengths)):
        if text < tokens and (code := _grid_of(call, tokens - text)):
            return code, text
    return None, 0


def _grid_of(call: Call, tokens: int) -> str | None:
    numbers = {name: call.get(name) for name in ("num_frames", "height", "width")}
    sides = {name: value for name, value in numbers.items() if isinstance(value, int)}
    if len(sides) >= 2 and math.prod(sides.values()) == tokens:
        return f"lambda {', '.join(sides)}: ({', '.join(sides)})"
    for name, x in call.items():
        if not isinstance(x, Tensor) or x.ndim not in (4, 5):
            continue
        for patch in (1, 2, 4, 8, 16):
            height, width = x.shape[-2] // patch, x.shape[-1] // patch
            if height * width == tokens:
                return f"lambda {name}: tuple(side // {patch} for side in {name}.shape[-2:])"
            for frames, axis in ((frames, axis) for frames in (1, 2, 4) for axis in (-3, -4)):
                if x.ndim == 5 and x.shape[axis] // frames * height * width == tokens:
                    return (
                        f"lambda {name}: ({name}.shape[{axis}] // {frames}, {name}.shape[-2] // {patch}, "
                        f"{name}.shape[-1] // {patch})"
                    )
    for name, x in call.items():
        if isinstance(x, Tensor) and x.shape[-1:] == (3,) and x.ndim in (2, 3) and x.shape[-2] == tokens:
            rows, columns = (int(x[..., axis].max() - x[..., axis].min()) + 1 for axis in (1, 2))
            if rows * columns == tokens:
                return f"lambda {name}: tuple(int({name}[..., axis].max()) + 1 for axis in (1, 2))"
    return None


def _table(inspection: Inspection) -> list[str]:
    rows = [("share of time", "blocks", "tokens", "class", "in")] if inspection.candidates else []
    for each in sorted(inspection.candidates, key=inspection.share, reverse=True):
        lists = (
            each.lists[0]
            if len(each.lists) == 1
            else f"{each.lists[0]} and {len(each.lists) - 1} other lists"
        )
        blocks = str(each.blocks) if each.of == each.blocks else f"{each.blocks} of {each.of}"
        rows.append((f"{inspection.share(each):.1%}", blocks, str(each.tokens), each.block, lists))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        wait_for(device)
    return time.perf_counter()
