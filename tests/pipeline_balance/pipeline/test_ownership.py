"""One object per parameter for the whole run: it goes to `meta` and back, and keeps what hangs on it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from pipeline_balance.elastic.shards.user_model import UserModel
from pipeline_balance.pipeline.model import ownership
from pipeline_balance.pipeline.model.layers import ModuleChain
from pipeline_balance.pipeline.model.ownership import Ownership, like_meta, put, sum_of_bits, try_put
from pipeline_balance.pipeline.run.generators import seeded, unit_seed
from pipeline_balance.pipeline.run.optimizers import Optimizers, from_json, to_json
from prophet.errors import SpecError


def _owned(*layers: nn.Module) -> Ownership:
    return Ownership(ModuleChain(list(layers), nn.functional.mse_loss))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_keeps_its_identity_hooks_and_attributes(frozen: bool) -> None:
    layer, fired = nn.Linear(3, 3), []
    p = layer.weight
    p.mark = "mine"  # type: ignore[attr-defined]
    after = p.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
    p.register_hook(lambda _: fired.append("gradient"))
    reference, optimizer = weakref.ref(p), torch.optim.Adam(layer.parameters())
    p.requires_grad_(not frozen)
    put(p, like_meta(p))
    assert (p.is_meta, p.requires_grad, layer.weight is p) == (True, not frozen, True)
    content = nn.Parameter(torch.ones(3, 3), requires_grad=not frozen)
    try_put(p, content)
    assert p.is_meta
    put(p, content)
    p.requires_grad_(True)
    layer(torch.ones(2, 3)).sum().backward()
    assert fired == ["gradient", "accumulated"]
    assert (p.mark, reference() is p, p.grad is not None) == ("mine", True, True)  # type: ignore[attr-defined]
    optimizer.step()
    after.remove()
    fired.clear()
    layer(torch.ones(2, 3)).sum().backward()
    assert fired == ["gradient"]


def test_torchs_weak_references_are_found_before_anything_changes() -> None:
    layer = nn.Linear(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.ones(2, 3))  # autocast keeps a cast weight by a weak reference
        try_put(layer.weight, like_meta(layer.weight))
        put(layer.weight, like_meta(layer.weight))
    assert layer.weight.is_meta


def test_state_goes_to_meta_and_is_missed() -> None:
    first, second = nn.Linear(2, 2), nn.BatchNorm1d(2)
    owned = _owned(first, second)
    assert owned.units_of["1.running_mean"] == (1,)
    owned.keep_only((1,))
    assert all(p.is_meta for p in first.parameters())
    assert not second.running_mean.is_meta  # type: ignore[union-attr]
    assert owned.missing((1,)) == []
    assert owned.missing((0,)) == ["0.weight", "0.bias"]
    owned.keep_only(())
    assert second.running_mean.is_meta  # type: ignore[union-attr]


def test_changes_of_the_model_are_seen() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    owned = _owned(first, second)
    before, trained = owned.structure(), owned.trainable()
    owned.read()
    assert owned.structure() == before
    prune.l1_unstructured(second, "weight", 0.5)
    owned.read()
    assert {"1.weight_orig", "1.weight_mask"} <= set(owned.units_of)
    assert owned.structure() != before
    first.bias.requires_grad_(False)
    assert owned.trainable() != trained
    second.bias = first.bias
    owned.read()
    assert owned.tied() == {"0.bias": (0, 1)}


def test_a_parameter_of_no_layer_is_named() -> None:
    class Odd(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(1, 1))
            self.scale = nn.Parameter(torch.ones(()))

    with pytest.raises(SpecError, match="parameter scale belongs to no layer"):
        Ownership(ModuleChain(Odd(), nn.functional.mse_loss))


@pytest.mark.parametrize("name", ["relu@1", "relu#1", "relu%1"])
def test_names_that_moves_would_cut_in_two_are_refused(name: str) -> None:
    """Cut at the sign, a name would lose its optimizer state in a move, and nobody would notice."""

    class Named(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.ModuleDict({name: nn.Linear(1, 1)}))

    message = f"'0.{name}.weight' cannot be moved: expected names of parameters and buffers without @, #, %"
    with pytest.raises(SpecError, match=message):
        Ownership(ModuleChain(Named(), nn.functional.mse_loss))
    model = Named()
    with pytest.raises(SpecError, match=message):
        UserModel(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))


def test_optimizers_options_and_mistakes() -> None:
    layer = nn.Linear(2, 2)
    named = dict(layer.named_parameters())
    made = Optimizers(lambda n: torch.optim.AdamW(n, lr=torch.tensor(0.1), betas=(0.8, 0.9)), named)
    told = made.options(named)
    other = Optimizers(lambda n: torch.optim.AdamW(n, lr=torch.tensor(0.5)), named)
    other.check(told, named)
    other.set_options(told)
    assert other.options(named) == told
    assert other.all[0].param_groups[0]["betas"] == (0.8, 0.9)
    split = Optimizers(lambda n: [torch.optim.SGD([p]) for _, p in n], named)
    with pytest.raises(SpecError, match=r"have \[1, 1\] groups, the saved ones \[1\]"):
        split.check(told, named)
    alone = Optimizers(lambda n: torch.optim.SGD([n[0][1]]), named)
    with pytest.raises(SpecError, match=r"holds other parameters than the saved one: \['bias'\]"):
        alone.check(told, named)
    with pytest.raises(SpecError, match="parameter weight is in two optimizers"):
        Optimizers(lambda n: [torch.optim.SGD([n[0][1]]), torch.optim.SGD([n[0][1]])], named)
    with pytest.raises(SpecError, match="LBFGS mixes all layers"):
        Optimizers(lambda n: torch.optim.LBFGS([p for _, p in n]), named)
    with pytest.raises(SpecError, match="must return optimizers of torch, got a int"):
        Optimizers(lambda n: [3], named)  # type: ignore[list-item]


def test_what_is_said_comes_back() -> None:
    value = {"a": [1, (2.5, None)], 3: {"x": torch.tensor([1.0, 2.0])}, "inf": float("inf")}
    back = from_json(to_json(value, "state"))
    assert back["a"] == [1, (2.5, None)]
    assert torch.equal(back[3]["x"], torch.tensor([1.0, 2.0]))
    with pytest.raises(SpecError, match="state is a object"):
        to_json(object(), "state")


def test_generators_depend_on_the_key_alone_and_leave_others_be() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with seeded(unit_seed(0, 1, 2, 3), torch.device("cpu")):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeded(unit_seed(0, 1, 2, 3), torch.device("cpu")):
        assert torch.equal(torch.rand(3), inside)
    keys = {unit_seed(*key) for key in [(0, 1, 2, 3), (1, 1, 2, 3), (0, 2, 2, 3), (0, 1, 3, 3), (0, 1, 2, 4)]}
    assert len(keys) == 5


def _by_hand(tensor: torch.Tensor) -> int:
    """`sum_of_bits` in Python."""
    size = tensor.element_size()
    kind = {1: torch.int8, 2: torch.int16}.get(size, torch.int32)
    found = 0
    for part in tensor.reshape(-1).contiguous().view(kind).split(ownership._PART):
        whole = part.numel() // ownership._ROW * ownership._ROW
        for some in filter(len, (part[:whole], part[whole:])):
            found = found * ownership._FACTOR + sum(n * bits for n, bits in enumerate(some.tolist(), start=1))
    return (found + (1 << 63)) % (1 << 64) - (1 << 63)


@pytest.mark.parametrize("part", [1 << 22, 64])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_a_digest_of_bits_knows_their_places(dtype: torch.dtype, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_ROW", 8)
    monkeypatch.setattr(ownership, "_PART", part)
    for shape in [(), (3,), (8,), (5, 7), (100,), (3, 5, 16)]:
        tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
        assert int(sum_of_bits([tensor])) == _by_hand(tensor)  # type: ignore[arg-type]
        for here, there in ((0, 1), (0, 2), (1, 9), (0, 16), (0, 94), (5, 133)):
            flat = tensor.clone().reshape(-1)
            if there < flat.numel():
                flat[there] = -flat[here] if dtype.is_floating_point else flat[here] ^ 1
                kept = int(sum_of_bits([flat]))  # type: ignore[arg-type]
                flat[[here, there]] = flat[[there, here]]
                assert int(sum_of_bits([flat])) != kept  # type: ignore[arg-type]
    assert int(sum_of_bits([tensor[..., ::2]])) == _by_hand(tensor[..., ::2])  # type: ignore[arg-type]
    assert sum_of_bits([]) is None
