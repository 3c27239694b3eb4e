"""Losses that layers compute and nobody adds: found in the first training pass, before any update.

A layer of one's own may return a loss beside its output, keep it as an attribute, or have a router whose loss its
model's own forward would add. In a pipeline no such forward runs. What no gradient comes back to was not added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from prophet.errors import SpecError

# attributes that keep a loss have one of these in their names
_KEPT = ("loss", "aux")
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
_RIGHT = "add it in the layer by x = pipeline_balance.add_loss(x, loss), or in loss_fn; detach() what is only looked at"
Key = tuple[int, int]


@dataclass(eq=False)
class _Watched:
    """A tensor that a layer has made, and whether a gradient came back to it."""

    what: str
    came: bool = False

    def note(self, grad: Tensor | None) -> None:
        self.came = self.came or grad is not None


@dataclass
class _Unit:
    """One layer's forward in one microbatch.

    Attributes:
        name: The layer in an error's text.
        losses: What must get a gradient, all of it.
        outputs: The layer's outputs, two of which must get a gradient if it has a `router`.
        router: Whether the layer has a router whose loss it does not add by itself.
    """

    name: str
    losses: list[_Watched]
    outputs: list[_Watched]
    router: bool


class LostLosses:
    """Watches layers' forward by stage and microbatch, and checks once their backward is over."""

    def __init__(self) -> None:
        self._units: dict[Key, list[_Unit]] = {}

    def before(self, module: nn.Module) -> set[int]:
        """Return the ids of losses that the layer keeps from an earlier forward."""
        return {id(t) for _, t in _kept(module)}

    def after(
        self, key: Key, unit: int, module: nn.Module, outputs: Sequence[Tensor], before: set[int], *, adds: bool
    ) -> None:
        """Watch what a layer has returned and kept.

        Args:
            key: Stage and microbatch.
            unit: The layer's number.
            module: The layer.
            outputs: What it has returned.
            before: What `before` returned ahead of this forward.
            adds: Whether the layer has added a loss by `add_loss`.
        """
        name = f"layer {unit} ({type(module).__name__})"
        # a router whose layer adds some loss is taken to add its own
        found = _Unit(name, [], [], router=not adds and asks_router_loss(module))
        flowing = [(i, t) for i, t in enumerate(outputs) if t.requires_grad]
        for i, t in flowing:
            found.outputs.append(_watch(t, f"output {i}"))
            if is_loss(t):
                found.losses.append(_watch(t, f"{name} returns a loss (output {i})"))
        for path, t in _kept(module):
            # what an earlier forward left behind was checked then
            if id(t) not in before:
                found.losses.append(_watch(t, f"{name} keeps a loss ({path})"))
        if found.losses or found.router:
            self._units.setdefault(key, []).append(found)

    def check(self, key: Key) -> None:
        """Raise `SpecError` for a loss of this stage and microbatch that no gradient came back to."""
        for unit in self._units.pop(key, ()):
            for lost in unit.losses:
                if not lost.came:
                    raise lost_loss(lost.what)
            # hidden states get a gradient in any case; router logits are a second output, and only a loss reaches them
            if unit.router and sum(output.came for output in unit.outputs) < 2:
                raise SpecError(
                    f"{unit.name} has a router whose loss its config asks for (output_router_logits), and nobody adds "
                    "it: ElasticPipeline.from_transformers(model) does, or add it in the layer by "
                    "x = pipeline_balance.add_loss(x, loss). Set config.output_router_logits = False to train "
                    "without it"
                )


def lost_loss(what: str) -> SpecError:
    """Make the error for a loss, described by `what`, that nobody adds."""
    return SpecError(f"{what} that nobody adds, so it trains nothing: {_RIGHT}")


def is_loss(tensor: Tensor) -> bool:
    """Whether a layer's output that requires grad is a single number."""
    return tensor.numel() == 1 and tensor.is_floating_point()


def _watch(tensor: Tensor, what: str) -> _Watched:
    found = _Watched(what)
    # a hook on a tensor runs only if a gradient reaches it
    tensor.register_hook(found.note)
    return found


def _kept(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Losses with a graph among the attributes of the module's parts."""
    return [
        (f"{path}.{name}" if path else name, t)
        for path, part in module.named_modules()
        for name, t in vars(part).items()
        if isinstance(t, Tensor)
        and t.grad_fn is not None
        and is_loss(t)
        and any(word in name.lower() for word in _KEPT)
    ]


def asks_router_loss(module: nn.Module) -> bool:
    """Whether the module has a router, and a configuration of transformers that asks for its loss."""
    parts = list(module.modules())
    if not any(isinstance(getattr(m, "top_k", None), int) and hasattr(m, "num_experts") for m in parts):
        return False
    configs = [c for m in parts if (c := getattr(m, "config", None)) is not None]
    return any(
        getattr(c, "output_router_logits", False) and any(getattr(c, name, 0) for name in _COEFFICIENTS)
        for c in configs
    )
