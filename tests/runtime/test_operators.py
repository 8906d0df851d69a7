"""The operators that stand for merging in compiled code: what they return is the compiler's alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import build, called, tiny
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import tomadiff
from tomadiff.runtime import compile

CHECKS = ("test_schema", "test_faketensor")
# as small as can be, since each is compiled
SHALLOW: dict[str, dict[str, Any]] = {
    "unet": {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D"),
        "mid_block_type": None,
    },
    "flux": {"num_layers": 1, "num_single_layers": 1},
    "sana": {"num_layers": 1},
    "pixart": {"num_layers": 1},
    "hunyuan_dit": {"num_layers": 4},
}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("unet", {}),  # conv + flatten + transpose in front of the first block
    ("unet", {"method": "ideal"}),
    ("sana", {}),  # modules inside of blocks, which are not residual
    ("sana", {"regions": "stripe"}),  # nothing is arranged, and nothing restored
    ("pixart", {"where": "block", "region_size": 5}),
    ("pixart", {"method": "tome", "where": "block"}),
    ("flux", {"where": "kv", "weigh_keys": True}),
    ("hunyuan_dit", {"where": "block", "method": "ideal"}),  # a plan that copies nothing
    ("hunyuan_dit", {"where": "block"}),  # merges another argument alike
]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Watched(torch.fx.Interpreter):
    """Runs a compiled graph node by node, and shows the operators with their arguments to `look`."""

    def __init__(self, graph: torch.fx.GraphModule, look: Callable[[Any, tuple], None]) -> None:
        super().__init__(graph)
        self.look = look
        self.returned: list[Tensor] = []

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        ours = getattr(target, "namespace", None) == "tomadiff"
        if ours:
            self.look(target, args)
        output = super().call_function(target, args, kwargs)
        if ours:
            self.returned += [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        return output


def compiled(model: nn.Module, look: Callable[[Any, tuple], None], reused: bool = False) -> nn.Module:
    """With a compiler that takes the memory of what operators returned for something else, if `reused`."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            watched = Watched(graph, look)
            output = tree_map_only(Tensor, Tensor.clone, watched.run(*args))
            for tensor in watched.returned if reused else ():
                tensor.fill_(float("nan") if tensor.is_floating_point() else 2**31)
            return output

        return run

    return torch.compile(model, fullgraph=True, backend=backend)


def applied(name: str, settings: dict[str, Any]) -> nn.Module:
    model = build(tiny(name), **SHALLOW[name])
    return tomadiff.apply(model, **{"ratio": 0.5, "dense_blocks": 0, **settings})


def transposed(x: Tensor) -> Tensor:
    """As behind conv, flatten and transpose: channels lie farthest apart."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim == 3 else x


@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_operators_return_what_their_fake_kernels_promise(name: str, settings: dict[str, Any]) -> None:
    """Strides too, whatever those of the inputs are; and none of it is a view of an input."""
    seen: Counter[str] = Counter()

    def check(operator: Any, args: tuple) -> None:
        call = compile._sites[args[0]].session.call
        # as they are, too: a copy of transposed ones would hide that the result is the argument itself
        for given in (args, tree_map_only(Tensor, transposed, args)):
            for utility in CHECKS:
                visits = Counter(call.visits)
                with torch.no_grad():
                    torch.library.opcheck(operator, given, test_utils=utility)
                call.visits = visits
        seen[operator._opname] += 1

    called(compiled(applied(name, settings), check), tiny(name))
    assert seen["merge"] and (seen["unmerge"] or settings.get("where") == "kv")


@pytest.mark.parametrize(("name", "settings"), SETTINGS[1:-2:2], ids=str)
def test_what_operators_returned_may_be_written_over(name: str, settings: dict[str, Any]) -> None:
    """Inductor owns what an operator returns, and reuses its memory."""
    times = (0.9, 0.6, 0.3)  # the second step makes new plans, and the third uses what it kept
    model = applied(name, settings)
    expected = [called(model, tiny(name), time)[0] for time in times]
    careless = compiled(applied(name, settings), lambda operator, args: None, reused=True)
    found = [called(careless, tiny(name), time)[0] for time in times]
    torch.testing.assert_close(found, expected)
