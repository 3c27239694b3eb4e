"""A small random model of every family in the installed transformers that has experts.

Which families there are, the package says: `modeling_files` walks it. One table of field names makes their
configurations small (`tests.helpers.family_sizes`); a family is named there only where that is not enough.

Shape legend: E experts, D model dim, B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.helpers.family_sizes import OVERRIDES, VOCABULARY, WANTED, shrunk
from tests.helpers.support import seeded

DECORATOR = "use_experts_implementation"
ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "ForTokenClassification", "")  # which model is taken first
LIMIT = 1_000_000  # parameters


# --- which families there are --------------------------------------------------------------------------------
@functools.cache
def modeling_files() -> list[str]:
    """The families of the installed transformers that have experts, by the names of their modeling files."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    return sorted(p.stem.removeprefix("modeling_") for p in root.glob("*/modeling_*.py") if _has_experts(p))


def _has_experts(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    if DECORATOR not in text and "Experts" not in text:  # reading costs less than parsing
        return False
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    return any(node.name.endswith("Experts") or DECORATOR in map(_called, node.decorator_list) for node in classes)


def _called(decorator: ast.expr) -> str:
    """The name of a decorator, with or without arguments."""
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    return decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")


def model_class(family: str) -> type[nn.Module]:
    """The class of a family that is trained: the first whose forward takes labels, in the order of `ENDINGS`."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    (path,) = root.glob(f"*/modeling_{family}.py")
    module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
    classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    classes = [c for c in classes if issubclass(c, transformers.PreTrainedModel)]
    wanted = WANTED.get(family)
    for ending in ENDINGS:
        for c in classes:
            takes = inspect.signature(c.forward).parameters
            if c.__name__ == wanted or (wanted is None and c.__name__.endswith(ending) and "labels" in takes):
                return c
    raise ValueError(f"{family}: none of its classes is given labels, and family_sizes.WANTED names none")


# --- a small model --------------------------------------------------------------------------------------------
def small(family: str, seed: int = 0, experts: int = 4) -> nn.Module:
    """A model of `family` with `experts` experts in each MoE layer, float32, in training mode, without randomness.

    Its weights are drawn anew, so that activations, routers and experts are far from zero at every width.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    chosen = model_class(family)
    with warnings.catch_warnings(), seeded(seed):
        warnings.simplefilter("ignore")
        config = shrunk(chosen.config_class, experts, OVERRIDES.get(family, {}))  # type: ignore[attr-defined]
        config._experts_implementation = config._attn_implementation = "eager"
        model = chosen(config)
        drawn(model)
    return model.float().train()


@torch.no_grad()
def drawn(model: nn.Module) -> None:
    """Draw every weight again, with a spread of one over the root of what it sums over; biases of ordinary size.

    Experts, and what reads the last layer, have twice that: much of the loss is to depend on experts.
    """
    inside = {id(p) for _, experts in experts_in(model) for p in experts.parameters()}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    if head is not None:
        inside |= {id(p) for p in head.parameters()}
    for name, p in model.named_parameters():
        if p.dim() > 1 and "conv" not in name and "A_log" not in name:
            sums = min(p.shape[-2:]) if p.dim() == 3 else p.shape[-1]  # stacked experts may be transposed
            p.normal_(std=(2.0 if id(p) in inside else 1.0) * sums**-0.5)
        elif name.endswith("bias") or not p.any():
            p.normal_(std=0.1)
    for name, b in model.named_buffers():
        if name.endswith("correction_bias"):
            b.normal_(std=0.1)


def experts_in(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every collection of routed experts."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Experts") and "shared" not in name.rsplit(".", 1)[-1]:
            yield name, module


# --- a batch, and its loss ------------------------------------------------------------------------------------
def batch(family: str, model: nn.Module, seed: int = 0, rows: int = 2, tokens: int = 8) -> dict[str, Tensor]:
    """A batch of text: token ids [B, S] and labels [B, S], on the host."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    labels = ids.clone()
    if type(model).__name__.endswith("ForTokenClassification"):
        labels = ids % model.config.num_labels  # type: ignore[union-attr, operator]
    more = (
        {"decoder_input_ids": ids.flip(1)} if "canvas_length" in vars(model.config) else {}
    )  # denoised, not continued
    return {"input_ids": ids, "labels": labels, **more}


def loss_of(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """The model's own loss on a batch, a scalar; routers' losses are in it where the family has them."""
    if "labels" in inspect.signature(model.forward).parameters:
        loss: Tensor = model(**given).loss
        return loss
    logits = model(**{name: t for name, t in given.items() if name != "labels"}).logits
    return nn.functional.cross_entropy(logits.flatten(0, -2), given["labels"].flatten())


@torch.no_grad()
def overloaded(model: nn.Module, experts: int = 4) -> nn.Module:
    """Send every token of `model` to the same experts, so that they have all the rows and the others none.

    Its routers say the same of every token, in the order of the experts' numbers; they are frozen so that it stays so.
    """
    at_random = model.config.model_type == "phimoe"  # of equals; there a norm makes every token sum up to the same
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if not re.search(r"gate\b|gate\.|router|classifier", name) or re.search(r"\.experts\.|attn", name):
            continue
        if not t.is_floating_point():
            t.copy_(torch.arange(t.shape[-1]).expand_as(t))  # a table of experts by token
        elif t.dim() and experts <= t.shape[0] <= experts + 2:  # some choose among shared or empty experts, too
            order = torch.arange(t.shape[0], 0, -1) / t.shape[0]
            t.copy_(
                order.view(-1, *[1] * (t.dim() - 1)).expand_as(t) if t.dim() == 1 or at_random else torch.zeros_like(t)
            )
            t.requires_grad_(False)
    return model
