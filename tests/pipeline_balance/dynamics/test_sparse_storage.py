"""Pruned layers that are stored sparse: the updates of the masked dense layer, in a quarter of its bytes at most."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline_balance.dynamics.csr import Pattern, product
from pipeline_balance.dynamics.pruning import PrunedLinear, note_shared, prune_globally, store_sparse
from pipeline_balance.pipeline.model.shapes import output_of
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from prophet.ranks.threads import ThreadWorld
from tests.helpers.launch import run_gloo

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=1e-2),
}


def _random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _alone(*sizes: int, **options: Any) -> PrunedLinear:
    """A layer whose weight no other module has, as somebody has said."""
    layer = PrunedLinear(*sizes, **options)
    note_shared([layer])
    return layer


def _model(sparse_below: float, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    make: list[Any] = [
        PrunedLinear(24, 40, sparse_below=sparse_below),
        nn.Tanh(),
        PrunedLinear(40, 16, sparse_below=sparse_below),
    ]
    # as large as those of the first layer, so a threshold for both leaves some of each
    nn.init.uniform_(make[2].weight, -(24**-0.5), 24**-0.5)
    return nn.Sequential(*make).to(dtype)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], dtype: torch.dtype) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        # two batches add their gradients up
        for part in range(2):
            x = _random(10 * step + part, 2, 7, 24, dtype=dtype)
            loss = (model(x) - x[..., :16].roll(1, -1)).pow(2).mean()
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
    return losses


def _prune(model: nn.Module, sparsity: float, optimizer: torch.optim.Optimizer) -> None:
    ThreadWorld(1).run(lambda c: prune_globally([model], sparsity, c, optimizer))


def _dense_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state_dict where masks are, and the moments."""
    found = dict(model.state_dict())
    for path, module in model.named_modules():
        if isinstance(module, PrunedLinear):
            mask = found[f"{path}.mask"]
            found[f"{path}.weight"] = found[f"{path}.weight"] * mask
            for name, value in optimizer.state[module.weight].items():
                if isinstance(value, Tensor) and value.dim():
                    found[f"{path}@{name}"] = module.dense_state("weight", value) * mask
    return found


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_and_updates_are_those_of_the_masked_dense_layer(name: str, dtype: torch.dtype, exact: float) -> None:
    found = []
    for sparse_below in (0.0, 0.5):
        model = _model(sparse_below, dtype)
        optimizer = OPTIMIZERS[name](model.parameters())
        objects = [id(p) for p in model.parameters()]
        losses = _train(model, optimizer, range(3), dtype)
        for number, sparsity in enumerate((0.3, 0.7, 0.9)):
            _prune(model, sparsity, optimizer)
            losses += _train(model, optimizer, range(3 * number, 3 * number + 3), dtype)
            layers = [m for m in model if isinstance(m, PrunedLinear)]
            assert [m.stored_sparse for m in layers] == [m.kept <= sparse_below for m in layers], [
                m.kept for m in layers
            ]
        # what the optimizer holds is what the layers train
        assert objects == [id(p) for p in model.parameters()]
        assert [id(p) for g in optimizer.param_groups for p in g["params"]] == objects
        assert any(m.stored_sparse for m in layers) == (sparse_below > 0)
        found.append((losses, _dense_of(model, optimizer)))
    (losses, dense), (others, sparse) = found
    assert others == pytest.approx(losses, rel=exact)
    assert dense.keys() == sparse.keys()
    for key, value in dense.items():
        torch.testing.assert_close(sparse[key], value, rtol=10 * exact, atol=10 * exact)
        assert key.endswith("bias") or torch.equal(sparse[key] == 0, value == 0), key


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors that a model and its optimizer hold, every storage once."""
    found: dict[int, int] = {}

    def note(value: Any) -> None:
        if isinstance(value, Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, Pattern):
            note(list(vars(value).values()))
        elif isinstance(value, list | tuple):
            for one in value:
                note(one)

    for module in model.modules():
        for values in (module._parameters, module._buffers, vars(module)):
            note(list(values.values()))
    for p in model.parameters():
        note([p.grad, *optimizer.state[p].values()])
    return sum(found.values())


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.layout == torch.strided:
                self.n_bytes = max(self.n_bytes, t.numel() * t.element_size())
        return result


def test_a_tenth_of_the_weights_takes_a_quarter_of_the_bytes_at_most_and_a_step_makes_no_dense_tensor() -> None:
    torch.manual_seed(0)
    whole = 4 * 4 * 1024 * 1024
    layer = _alone(1024, 1024, bias=False, sparse_below=0.2)
    optimizer = torch.optim.Adam(layer.parameters())

    def step() -> None:
        optimizer.zero_grad()
        layer(x).pow(2).mean().backward()
        optimizer.step()

    x = torch.randn(16, 1024, requires_grad=True)
    step()
    assert _held(layer, optimizer) > whole
    mask = torch.zeros(1024 * 1024, dtype=torch.bool)
    mask[torch.randperm(1024 * 1024)[: 1024 * 1024 // 10]] = True
    layer.prune(mask.view(1024, 1024), optimizer)
    with _Largest() as largest:
        step()
    # weights, gradients, two moments, columns: an eighth; the transpose takes two indices more
    assert 0.125 * whole * 0.99 < _held(layer, optimizer) <= 0.25 * whole
    assert largest.n_bytes < 4 * 1024 * 1024 / 4


def test_a_state_dict_is_dense_and_loads_into_both_forms() -> None:
    model = _model(0.5, torch.float64)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    _train(model, optimizer, range(2), torch.float64)
    _prune(model, 0.8, optimizer)
    _train(model, optimizer, range(2), torch.float64)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert {k: (tuple(v.shape), v.dtype) for k, v in saved[0].items()} == {
        k: (tuple(v.shape), v.dtype) for k, v in _model(0.0, torch.float64).state_dict().items()
    }
    # into the layers that go on, which are sparse, and into new ones, which are not
    after = _train(model, optimizer, range(2, 5), torch.float64)
    fresh = _model(0.5, torch.float64)
    for one, mine in ((model, optimizer), (fresh, OPTIMIZERS["adam"](fresh.parameters()))):
        one.load_state_dict(saved[0])
        assert all(m.stored_sparse == (one is model) for m in one if isinstance(m, PrunedLinear))
        store_sparse([one], mine)
        mine.load_state_dict(copy.deepcopy(saved[1]))
        assert all(m.stored_sparse for m in one if isinstance(m, PrunedLinear))
        assert all(torch.equal(v, one.state_dict()[k]) for k, v in saved[0].items())
        assert _train(one, mine, range(2, 5), torch.float64) == after
    # a layer that never is sparse reads it as well
    dense = _model(0.0, torch.float64)
    dense.load_state_dict(saved[0])
    model.load_state_dict(dense.state_dict())
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in dense.state_dict().items())


def test_what_cannot_be_stored_sparse_is_refused_with_nothing_changed() -> None:
    layer = _alone(8, 8, sparse_below=0.5)
    few, fewer = torch.arange(64).view(8, 8) % 4 == 0, torch.arange(64).view(8, 8) % 8 == 0
    before = copy.deepcopy(layer.state_dict())

    def unchanged() -> bool:
        return all(torch.equal(v, layer.state_dict()[k]) for k, v in before.items())

    with pytest.raises(SpecError, match=r"pass optimizers=, \(\) for none"):
        layer.prune(few)
    factored = torch.optim.Adafactor(layer.parameters())
    layer(torch.randn(3, 8)).pow(2).mean().backward()
    factored.step()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(SpecError, match=r"Adafactor keeps 'row_var' of \[8, 1\].*set sparse_below=0"):
        layer.prune(few, factored)
    assert unchanged()
    layer.prune(few, ())
    assert layer.stored_sparse
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(SpecError, match="pass optimizers="):
        layer.prune(fewer)
    assert unchanged()
    # a mask that is set by hand does not say what becomes of the values
    layer.mask = fewer  # type: ignore[misc]
    with pytest.raises(SpecError, match=r"change their mask by prune\(mask, optimizers\)"):
        layer(torch.randn(3, 8))


def test_a_loss_that_is_kept_does_no_harm_and_a_backward_pass_that_comes_too_late_is_an_error() -> None:
    layer, x = _alone(8, 8, sparse_below=0.5), torch.randn(3, 8)
    kept = []
    for divisor in (4, 8, 16):
        kept.append(layer(x).pow(2).mean())
        kept[-1].backward()
        late = layer(x).pow(2).mean()
        layer.prune(torch.arange(64).view(8, 8) % divisor == 0, ())
        with pytest.raises(SpecError, match="prune between updates"):
            late.backward()
        # the loss of a step that is over is another matter
        layer(x).pow(2).mean().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.shape == layer.weight.shape == (64 // divisor,)
    layer.weight.requires_grad_(requires_grad=False)
    layer.prune(torch.arange(64).view(8, 8) % 32 == 0, ())
    layer(x).sum().backward()
    assert layer.weight.shape == (2,)


def test_other_types_and_layers_of_next_to_nothing_stay_dense() -> None:
    half = _alone(8, 8, sparse_below=0.5).bfloat16()
    half.prune(torch.arange(64).view(8, 8) % 4 == 0)
    empty, sparse = (_alone(8, 8, sparse_below=0.5) for _ in range(2))
    sparse.prune(torch.arange(64).view(8, 8) % 4 == 0, ())
    empty.prune(torch.arange(64).view(8, 8) == 0)
    # one that is stored sparse becomes dense when next to nothing is left
    optimizer = torch.optim.Adam(sparse.parameters())
    sparse(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    moment = optimizer.state[sparse.weight]["exp_avg"].clone()
    sparse.prune(torch.arange(64).view(8, 8) == 4, optimizer)
    assert optimizer.state[sparse.weight]["exp_avg"].view(-1).nonzero().tolist() == [[4]]
    assert optimizer.state[sparse.weight]["exp_avg"][0, 4] == moment[1]
    assert sparse.weight.grad is not None
    assert sparse.weight.grad.shape == sparse.weight.shape == (8, 8)
    assert sparse.mask.view(-1).nonzero().tolist() == [[4]]
    assert not half.stored_sparse
    assert not empty.stored_sparse
    assert empty.kept == 1 / 64


@pytest.mark.parametrize("left", [0, 1])
def test_layers_of_next_to_nothing_have_no_dense_product(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, dense = _alone(64, 48, sparse_below=0.1), _alone(64, 48)
    dense.load_state_dict(layer.state_dict())
    mask = torch.zeros(48, 64, dtype=torch.bool)
    mask[5, :left] = True
    linear, called = nn.functional.linear, list[PrunedLinear]()
    found: dict[PrunedLinear, list[Tensor | None]] = {}
    for each in (layer, dense):
        each.prune(mask, ())
        monkeypatch.setattr(nn.functional, "linear", lambda *given, of=each: (called.append(of), linear(*given))[1])
        x = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
        out = each(x)
        out.pow(2).sum().backward()
        found[each] = [out, x.grad, each.weight.grad, each.bias.grad]
    assert called == [dense]
    for one, other in zip(found[layer], found[dense], strict=True):
        assert one is not None
        torch.testing.assert_close(one, other)
    # a mask that is changed later counts
    layer.mask.fill_(True)
    nn.init.ones_(layer.weight)
    torch.testing.assert_close(layer(x), linear(x, layer.weight, layer.bias))


def test_all_ranks_learn_that_optimizers_are_missing_and_masks_do_not_depend_on_the_form() -> None:
    models = [_model(below, torch.float64) for below in (0.0, 0.5)]
    for sparsity in (0.4, 0.7, 0.85):
        for model in models:
            cuts = [[model[0]], [model[2]], []]
            ThreadWorld(3).run(lambda c, cuts=cuts, s=sparsity: prune_globally(cuts[c.rank], s, c, ()))  # type: ignore[misc]
        assert all(torch.equal(a.mask, b.mask) for a, b in zip(*(m[::2] for m in models), strict=True))
    assert all(m.stored_sparse for m in models[1][::2])
    cuts = [[models[0][0]], [models[1][2]], []]

    def lacking(collective: Any) -> str:
        with pytest.raises(SpecError, match="layers with sparse_below are stored sparse: pass optimizers") as raised:
            prune_globally(cuts[collective.rank], 0.9, collective)
        return str(raised.value)

    assert len(set(ThreadWorld(3).run(lacking))) == 1


def test_under_autocast_products_are_in_the_type_of_the_weights() -> None:
    layer = _alone(8, 8, sparse_below=0.5)
    layer.prune(torch.arange(64).view(8, 8) % 4 == 0, ())
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    out.sum().backward()
    assert out.dtype == layer.weight.grad.dtype == torch.float32  # type: ignore[union-attr]
    assert x.grad is not None


def test_a_pattern_finds_its_entries_and_those_of_its_transpose() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        rows, columns = (int(torch.randint(1, 9, (1,), generator=generator)) for _ in range(2))
        dense = _random(seed, rows, columns)
        mask = torch.rand(rows, columns, generator=generator) < 0.4
        pattern = Pattern.unpack(Pattern.of(mask).packed(), (rows, columns))
        values = pattern.pick(dense)
        assert torch.equal(pattern.mask(), mask)
        assert torch.equal(pattern.dense(values), dense * mask)
        assert torch.equal(pattern.matrix(values).to_dense(), dense * mask)
        transposed, order = pattern.transposed
        assert torch.equal(transposed.matrix(values[order]).to_dense(), (dense * mask).t())
        left = torch.rand(len(values), generator=generator) < 0.5
        assert torch.equal(pattern.only(left).packed(), Pattern.of(pattern.dense(left)).packed())
    with pytest.raises(SpecError, match=r"a pattern of 2 entries cannot hold values of \[3\]"):
        product(_random(0, 4, 2), _random(0, 3), Pattern.of(torch.eye(2, dtype=torch.bool)))


def _every(divisor: int, first: int = 0) -> Tensor:
    """A mask of [8, 8] with one place in `divisor`."""
    return torch.arange(64).view(8, 8) % divisor == first


def _sparse(make: Make = OPTIMIZERS["momentum"]) -> tuple[PrunedLinear, torch.optim.Optimizer]:
    """A layer that was stored sparse before its first update."""
    torch.manual_seed(0)
    layer = _alone(8, 8, sparse_below=0.5)
    optimizer = make(layer.parameters())
    layer.prune(_every(4), optimizer)
    _update(layer, optimizer)
    return layer, optimizer


def _update(layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    layer(torch.ones(3, 8)).pow(2).sum().backward()
    optimizer.step()


def _held_now(layer: PrunedLinear, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all that a layer and its optimizer have."""
    kept = [t for t in optimizer.state[layer.weight].values() if isinstance(t, Tensor)]
    grads = [p.grad for p in layer.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (*layer.parameters(), *layer._buffers.values(), *grads, *kept) if t is not None]


def _refused(layer: PrunedLinear, optimizer: torch.optim.Optimizer, call: Callable[[], Any], words: str) -> None:
    before = _held_now(layer, optimizer)
    with pytest.raises(SpecError, match=re.escape(words)):
        call()
    after = _held_now(layer, optimizer)
    assert len(before) == len(after)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_loading_into_a_sparse_layer_keeps_what_its_optimizer_is_for() -> None:
    layer, optimizer = _sparse()
    saved = copy.deepcopy(layer.state_dict())
    _update(layer, optimizer)
    layer.load_state_dict(saved)
    assert layer.stored_sparse
    assert all(torch.equal(v, layer.state_dict()[k]) for k, v in saved.items())
    _update(layer, optimizer)
    # torch refuses a bias, and the layer goes on
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        layer.load_state_dict(saved | {"bias": torch.zeros(3)})
    assert layer.stored_sparse
    assert layer.weight.grad is not None
    _update(layer, optimizer)
    layer.load_state_dict(saved, assign=True)
    assert layer.stored_sparse
    assert all(torch.equal(v, layer.state_dict()[k]) for k, v in saved.items())


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("mask", lambda m: _every(4, 1), "mask differs from that of the layer, which is stored sparse: load into a"),
        ("mask", torch.ones_like, "mask differs from that of the layer"),
        ("mask", lambda m: m.long(), "a mask of this layer is torch.bool of [8, 8], got torch.int64 of [8, 8]"),
        ("weight", lambda w: torch.ones(16), "weight is [16], and that of the layer [8, 8]"),
    ],
)
def test_a_sparse_layer_refuses_what_is_of_another_mask(name: str, change: Any, words: str) -> None:
    layer, optimizer = _sparse()
    state = layer.state_dict()
    state[name] = change(state[name])
    _refused(layer, optimizer, lambda: layer.load_state_dict(state), words)
    _update(layer, optimizer)


@pytest.mark.parametrize(("sparse_below", "first"), [(0.0, 0), (0.5, 0), (0.5, 1)])
def test_moments_that_are_sparse_already_are_refused_for_a_dense_weight(sparse_below: float, first: int) -> None:
    optimizer = _sparse()[1]
    other = PrunedLinear(8, 8, sparse_below=sparse_below)
    other._buffers["mask"] = _every(4, first)
    mine = OPTIMIZERS["momentum"](other.parameters())
    mine.load_state_dict(optimizer.state_dict())
    _refused(other, mine, lambda: store_sparse([other], mine), "store_sparse first, then load the optimizer")


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_an_optimizers_state_is_of_the_layers_places(name: str) -> None:
    layer, optimizer = _sparse(OPTIMIZERS[name])
    saved = copy.deepcopy(optimizer.state_dict())
    # as many values, and one place further
    other = _alone(8, 8, sparse_below=0.5)
    mine = OPTIMIZERS[name](other.parameters())
    other.prune(_every(4, 1), mine)
    assert other.weight.shape == layer.weight.shape
    words = "is of weights in other places than those that this layer has left"
    _refused(other, mine, lambda: mine.load_state_dict(saved), words)
    _update(other, mine)
    # an optimizer that nobody had named takes it, and is refused once it is
    unknown = OPTIMIZERS[name](other.parameters())
    unknown.load_state_dict(saved)
    _refused(other, unknown, lambda: other.prune(_every(8, 1), unknown), words)
    # and with fewer values
    layer.prune(_every(8), optimizer)
    _refused(layer, optimizer, lambda: optimizer.load_state_dict(saved), words)
    _update(layer, optimizer)


def test_a_state_dict_of_the_same_places_loads_with_the_bits_that_it_had() -> None:
    layer, optimizer = _sparse(OPTIMIZERS["adam"])
    saved = copy.deepcopy((layer.state_dict(), optimizer.state_dict()))
    kept = {name for entries in optimizer.state.values() for name in entries}
    _update(layer, optimizer)
    want = copy.deepcopy(layer.state_dict())
    again = PrunedLinear(8, 8, sparse_below=0.5)
    mine = OPTIMIZERS["adam"](again.parameters())
    again.load_state_dict(saved[0])
    store_sparse([again], mine)
    mine.load_state_dict(saved[1])
    # the optimizer itself keeps no more than torch's does
    assert {name for entries in mine.state.values() for name in entries} == kept
    _update(again, mine)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in want.items())
    # one that was saved before places were is taken as it is
    plain = copy.deepcopy(saved[1])
    for entries in plain["state"].values():
        assert set(entries) - kept <= {"places_digest"}
        entries.pop("places_digest", None)
    mine.load_state_dict(plain)


@pytest.mark.parametrize("stored_sparse", [False, True])
@pytest.mark.parametrize("mask", [_every(8).long(), _every(8).float(), _every(8)[:1], _every(8).view(4, 16)])
def test_only_a_mask_of_the_layer_prunes_it(mask: Tensor, stored_sparse: bool) -> None:
    layer, optimizer = _sparse() if stored_sparse else (_alone(8, 8), torch.optim.SGD([torch.zeros(1)]))
    _refused(layer, optimizer, lambda: layer.prune(mask, optimizer), "a mask of this layer is torch.bool of [8, 8]")


@pytest.mark.parametrize("stored_sparse", [False, True])
def test_pruning_in_inference_mode_is_refused_with_the_gradient_still_there(stored_sparse: bool) -> None:
    layer = _alone(8, 8, sparse_below=0.5)
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    if stored_sparse:
        layer.prune(_every(4), optimizer)
    _update(layer, optimizer)

    def prune() -> None:
        with torch.inference_mode():
            layer.prune(_every(8), optimizer)

    _refused(layer, optimizer, prune, "prune outside of it")


@pytest.mark.parametrize("how", ["prune_globally", "store_sparse"])
def test_optimizers_may_come_one_by_one(how: str) -> None:
    model = nn.Sequential(*(PrunedLinear(8, 8, sparse_below=0.5) for _ in range(2)))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    _update(model, optimizer)
    given = (one for one in [optimizer])
    if how == "store_sparse":
        for module in model:
            module._buffers["mask"] = _every(4)
        store_sparse((m for m in model), given)
    else:
        prune_globally([model], 0.7, ThreadWorld(1).collective(0), given)
    assert all(m.stored_sparse for m in model if isinstance(m, PrunedLinear))
    _update(model, optimizer)


@pytest.mark.parametrize("other", [PrunedLinear(8, 8, sparse_below=0.5), nn.Embedding(8, 8), nn.Linear(8, 8)])
def test_a_weight_that_another_module_has_stays_dense(other: Any) -> None:
    layer = PrunedLinear(8, 8, sparse_below=0.5)
    layer.weight = other.weight
    prune_globally([layer, other], 0.7, ThreadWorld(1).collective(0), ())
    store_sparse([layer, other], ())
    assert not layer.stored_sparse
    assert layer.kept <= 0.5
    assert layer(torch.ones(3, 8)).shape == (3, 8)


@pytest.mark.parametrize("other", [PrunedLinear(8, 8, sparse_below=0.5), nn.Embedding(8, 8), nn.Linear(8, 8)])
def test_a_single_layer_is_not_stored_sparse_until_somebody_says_who_has_its_weight(other: Any) -> None:
    layer = PrunedLinear(8, 8, sparse_below=0.5)
    layer.weight = other.weight
    optimizer = OPTIMIZERS["momentum"](layer.parameters())
    _update(layer, optimizer)
    words = "nobody has said whether another module has them"
    _refused(layer, optimizer, lambda: layer.prune(_every(8), optimizer), words)
    note_shared([layer, other])
    layer.prune(_every(8), optimizer)
    assert not layer.stored_sparse
    assert layer.kept == 1 / 8


def _tied(rank: int, size: int, kind: str) -> list[float]:
    torch.manual_seed(0)
    first = PrunedLinear(8, 8, bias=False, sparse_below=0.5)
    last: nn.Module = first
    if kind == "linear":
        last = nn.Linear(8, 8, bias=False)
        last.weight = first.weight
    layers = [first, nn.Tanh(), nn.Linear(8, 8), last]
    given: dict[str, Any] = {"make_optimizer": lambda named: torch.optim.SGD(named, lr=0.01), "timeout_s": 30.0}
    pipe = ElasticPipeline.from_modules(
        layers, nn.functional.mse_loss, StageMap((0, 2, 4), (0, 1)), microbatches=2, **given
    )
    x = _random(0, 4, 8, dtype=torch.float32)
    losses = [pipe.step(x, x)]
    prune_globally(list(pipe.layers.values()), 0.7, pipe.groups.collective, pipe.optimizer)
    assert not first.stored_sparse
    return losses + [pipe.step(x, x) for _ in range(2)]


@pytest.mark.parametrize("kind", ["the same", "linear"])
def test_a_weight_on_several_ranks_stays_dense(kind: str) -> None:
    results = run_gloo(_tied, 2, kind)
    assert results[0] == results[1]


def _changed_gradient(rank: int, size: int) -> None:
    layers = [PrunedLinear(8, 8, sparse_below=0.5) for _ in range(2)]
    given: dict[str, Any] = {"make_optimizer": lambda named: torch.optim.SGD(named, lr=0.01), "timeout_s": 30.0}
    pipe = ElasticPipeline.from_modules(
        layers, nn.functional.mse_loss, StageMap((0, 1, 2), (0, 1)), microbatches=2, **given
    )
    x = _random(0, 4, 8, dtype=torch.float32)
    # the first leaves them dense, the second does not
    for sparsity in (0.3, 0.7, 0.8):
        pipe.step(x, x)
        prune_globally(list(pipe.layers.values()), sparsity, pipe.groups.collective, pipe.optimizer)
    pipe.step(x, x)
    weight = pipe.layers[rank].weight
    assert weight.grad is not None
    weight.grad = weight.grad * 3
    with pytest.raises(SpecError, match="were changed after the step that has used them"):
        pipe.step(x, x)


def test_a_pipeline_knows_gradients_that_pruning_has_made_from_others() -> None:
    run_gloo(_changed_gradient, 2)


@pytest.mark.parametrize("sparse_below", [0.0, 0.5])
def test_a_norm_counts_no_gradient_of_what_was_pruned_after_the_backward_pass(sparse_below: float) -> None:
    torch.manual_seed(0)
    layer = _alone(8, 8, bias=False, sparse_below=sparse_below)
    layer(torch.randn(3, 8)).pow(2).sum().backward()
    assert layer.weight.grad is not None
    expected = layer.weight.grad[_every(4)].norm()
    layer.prune(_every(4), ())
    torch.testing.assert_close(nn.utils.clip_grad_norm_(layer.parameters(), 1e9), expected)


def test_a_backward_pass_may_run_under_autocast() -> None:
    layer, x = _sparse()[0], torch.ones(3, 8, requires_grad=True)
    layer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x).sum().backward()
    expected = torch.ones(3, 8) @ layer.dense_state("weight", layer.weight.detach())
    torch.testing.assert_close(x.grad, expected)
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, torch.full_like(layer.weight, 3.0))


def test_a_sparse_layer_that_gets_another_type_or_size_says_so() -> None:
    layer, x = _sparse()[0], torch.ones(3, 8)
    with pytest.raises(SpecError, match=r"takes 8 features, got an input of \[3, 16\]"):
        layer(torch.ones(3, 16))
    with pytest.raises(SpecError, match=r"are float32 or float64, not torch.bfloat16: set sparse_below=0"):
        layer.bfloat16()(x.bfloat16())


def test_a_frozen_sparse_layer_holds_no_input() -> None:
    layer, held = _sparse()[0].requires_grad_(requires_grad=False), list[tuple[int, ...]]()
    x = torch.ones(3, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (held.append(tuple(t.shape)), t)[1], lambda t: t):
        layer(x).sum().backward()
    assert held == [(16,)]
    assert x.grad is not None


def test_a_state_dict_of_a_sparse_layer_is_a_copy() -> None:
    layer = _sparse()[0]
    before = layer.state_dict()
    layer.state_dict()["weight"].zero_()
    assert torch.equal(layer.state_dict()["weight"], before["weight"])
    with pytest.raises(SpecError, match="keep_vars=True"):
        layer.state_dict(keep_vars=True)


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.Muon([next(iter(p))]), torch.optim.LBFGS], ids=["muon", "lbfgs"]
)
def test_optimizers_that_take_a_weight_for_a_matrix_or_a_vector_are_refused(make: Any) -> None:
    layer = _alone(8, 8, bias=False, sparse_below=0.5)
    optimizer = make(layer.parameters())
    _refused(layer, optimizer, lambda: layer.prune(_every(4), optimizer), "cannot train weights that are stored sparse")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("every", [1, 4, 192])
def test_a_layer_tells_its_shape_without_values_dense_sparse_or_next_to_empty(every: int, nested: bool) -> None:
    layer = _alone(8, 24, sparse_below=0.5)
    layer.prune(torch.arange(192).view(24, 8) % every == 0, ())
    assert layer.stored_sparse == (every == 4)
    # a layer of torch raises where the shape does not fit
    module = nn.Sequential(layer, nn.Linear(24, 3)) if nested else layer
    leaves, _ = output_of(module, (torch.ones(2, 5, 8),), {}, torch.device("cpu"))
    assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [((2, 5, 3 if nested else 24), torch.float32)]
