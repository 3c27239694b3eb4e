"""Pruned layers that are stored sparse: the updates of the masked dense layer, in a quarter of its bytes at most."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline_balance.dynamics.csr import Pattern, product
from pipeline_balance.dynamics.pruning import PrunedLinear, prune_globally, store_sparse
from prophet.errors import SpecError
from prophet.ranks.threads import ThreadWorld

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
    layer = PrunedLinear(1024, 1024, bias=False, sparse_below=0.2)
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
        mine.load_state_dict(copy.deepcopy(saved[1]))
        assert not any(m.stored_sparse for m in one if isinstance(m, PrunedLinear))
        store_sparse([one], mine)
        assert all(m.stored_sparse for m in one if isinstance(m, PrunedLinear))
        assert all(torch.equal(v, one.state_dict()[k]) for k, v in saved[0].items())
        assert _train(one, mine, range(2, 5), torch.float64) == after
    # a layer that never is sparse reads it as well
    dense = _model(0.0, torch.float64)
    dense.load_state_dict(saved[0])
    model.load_state_dict(dense.state_dict())
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in dense.state_dict().items())


def test_what_cannot_be_stored_sparse_is_refused_with_nothing_changed() -> None:
    layer = PrunedLinear(8, 8, sparse_below=0.5)
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
    layer, x = PrunedLinear(8, 8, sparse_below=0.5), torch.randn(3, 8)
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
    half = PrunedLinear(8, 8, sparse_below=0.5).bfloat16()
    half.prune(torch.arange(64).view(8, 8) % 4 == 0)
    empty, sparse = (PrunedLinear(8, 8, sparse_below=0.5) for _ in range(2))
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
    layer = PrunedLinear(8, 8, sparse_below=0.5)
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
