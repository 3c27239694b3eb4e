"""A chain of modules as a pipeline's model: what passes, how labels count, what is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model import layers as layers_module
from pipeline_balance.pipeline.model.layers import Activations, ModuleChain
from prophet.errors import SpecError


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.linear(x), {"rest": x.sum(dim=1), "ids": torch.ones(x.shape[0], dtype=torch.int64)}


class _Named(nn.Module):
    def forward(self, x: Tensor, others: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": x * others["rest"][:, None] + others["ids"][:, None]}


class _Last(nn.Module):
    def forward(self, *, y: Tensor) -> Tensor:
        return y + 1


def _chain(**options: object) -> ModuleChain:
    layers = [nn.Linear(3, 4), _Two(), _Named(), _Last()]
    layers[0].requires_grad_(False)
    return ModuleChain(layers, nn.functional.mse_loss, **options)  # type: ignore[arg-type]


def _through(chain: ModuleChain, x: Tensor) -> tuple[Activations, list[Activations]]:
    (part,) = chain.cut(x, x, 1)
    expected = chain.activations(part)
    passed: Activations = ()
    for unit in range(len(chain.units)):
        passed = chain.run(unit, passed, part)
        agreed = expected[unit + 1]
        assert [(t.shape, t.dtype) for t in passed] == [(t.shape, t.dtype) for t in agreed]
        assert all(t.is_meta for t in agreed)
        # a gradient may come back wherever one is kept
        assert all(a.requires_grad for t, a in zip(passed, agreed, strict=True) if t.requires_grad)
    return passed, expected


def test_tuples_and_dictionaries_pass() -> None:
    torch.manual_seed(0)
    chain, x = _chain(), torch.randn(5, 3)
    (found,), expected = _through(chain, x)
    first, both = chain.units[0](x), chain.units[1]
    y, others = both(first)
    assert torch.equal(found, chain.units[3](y=chain.units[2](y, others)["y"]))
    assert [[t.requires_grad for t in b] for b in expected] == [[], [False], [True, True, False], [True], [True]]


def test_layers_on_meta_and_other_precisions_have_shapes_too() -> None:
    layers = [nn.Linear(3, 4, device="meta"), nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4)), nn.Linear(4, 2)]
    chain = ModuleChain(layers, nn.functional.mse_loss)
    (part,) = chain.cut(torch.randn(6, 3), None, 1)
    before = {n: t.clone() for n, t in layers[1].state_dict().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [b[0].dtype for b in chain.activations(part)[1:]] == [torch.bfloat16, torch.bfloat16, torch.bfloat16]
    assert [b[0].dtype for b in chain.activations(part)[1:]] == [torch.float32] * 3
    assert all(torch.equal(t, before[n]) for n, t in layers[1].state_dict().items())


def test_who_freezes_layers_has_no_shape_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long as a small layer's forward, and a model that freezes layer by layer would do it every time."""
    chain = _chain()
    (part,) = chain.cut(torch.randn(6, 3), None, 1)
    before = chain.activations(part)
    monkeypatch.setattr(layers_module, "output_of", None)
    for train in ([1], [], [0, 1], [0]):
        for unit in (0, 1):
            chain.units[unit].requires_grad_(unit in train)
        found = chain.activations(part)
        first = min(train, default=len(chain.units))
        for unit, (was, now) in enumerate(zip(before[1:], found[1:], strict=True)):
            assert [(t.shape, t.dtype, t.is_meta) for t in now] == [(t.shape, t.dtype, t.is_meta) for t in was]
            assert [t.requires_grad for t in now] == [unit >= first and t.is_floating_point() for t in now]
        with torch.no_grad():
            assert not any(t.requires_grad for b in chain.activations(part) for t in b)
        assert chain.activations(part) is found


def test_shapes_that_were_found_while_evaluating_serve_training() -> None:
    chain = _chain()
    (part,) = chain.cut(torch.randn(6, 3), None, 1)
    with torch.inference_mode():
        assert not any(t.requires_grad for b in chain.activations(part) for t in b)
    assert [[t.requires_grad for t in b] for b in chain.activations(part)][1:3] == [[False], [True, True, False]]


def test_a_model_of_another_type_has_other_activations() -> None:
    chain = ModuleChain([nn.Linear(3, 4), nn.Linear(4, 2)], nn.functional.mse_loss)
    (part,) = chain.cut(torch.randn(6, 3), None, 1)
    chain.activations(part)
    chain.root.to(torch.float64)
    (part,) = chain.cut(torch.randn(6, 3, dtype=torch.float64), None, 1)
    (first,) = chain.activations(part)[1]
    assert first.dtype == torch.float64
    words = ModuleChain([nn.Embedding(5, 3), nn.Linear(3, 2)], nn.functional.mse_loss)
    (part,) = words.cut(torch.zeros(6, dtype=torch.int64), None, 1)
    assert words.activations(part)[1][0].dtype == torch.float32
    words.root.to(torch.bfloat16)
    assert words.activations(part)[1][0].dtype == torch.bfloat16


def test_a_split_embedding_that_thaws_has_gradients_again() -> None:
    layers = [nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5)]
    chain = ModuleChain(layers, nn.CrossEntropyLoss(), split_vocabulary=True)
    (part,) = chain.cut(torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64), 1)
    for train in (False, True, False):
        chain.units[0].requires_grad_(train)
        assert [t.requires_grad for b in chain.activations(part) for t in b] == [train, train, True, True]


def test_a_layer_that_is_replaced_has_new_shapes() -> None:
    root = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2)))
    chain = ModuleChain(root, nn.functional.mse_loss)
    (part,) = chain.cut(torch.randn(6, 3), None, 1)
    assert chain.activations(part)[-1][0].shape == (6, 2)
    root[1][0] = nn.Linear(4, 7)  # type: ignore[index, operator]
    assert chain.activations(part)[-1][0].shape == (6, 7)


@pytest.mark.parametrize(
    ("loss_fn", "labels", "count"),
    [
        (nn.functional.cross_entropy, torch.tensor([1, -100, 2, -100]), 2),
        (nn.CrossEntropyLoss(ignore_index=1), torch.tensor([1, 0, 2, 1]), 2),
        (nn.functional.mse_loss, torch.zeros(4, 3), 4),
    ],
)
def test_labels_that_count(loss_fn: object, labels: Tensor, count: int) -> None:
    chain = ModuleChain([nn.Linear(2, 3)], loss_fn)  # type: ignore[arg-type]
    (part,) = chain.cut(torch.randn(4, 2), labels, 1)
    chain.activations(part)
    assert chain.counted(part) == count
    out = chain.run(0, (), part)
    torch.testing.assert_close(chain.loss(out, part), loss_fn(out[0], labels) * count)  # type: ignore[operator]


def test_a_microbatch_whose_labels_all_do_not_count_has_no_loss_and_no_gradient() -> None:
    chain = ModuleChain([nn.Linear(2, 3)], nn.functional.cross_entropy)
    (part,) = chain.cut(torch.randn(2, 2), torch.tensor([-100, -100]), 1)
    chain.activations(part)
    loss = chain.loss(chain.run(0, (), part), part)
    loss.backward()
    assert loss == 0.0
    assert float(chain.units[0].weight.grad.abs().sum()) == 0.0  # type: ignore[union-attr, operator]


def test_rows_are_spread_and_numbered() -> None:
    parts = _chain().cut(torch.arange(21.0).view(7, 3), torch.arange(7), 3, first=4)
    assert [p.number for p in parts] == [4, 5, 6]
    assert [p.inputs["input"].shape[0] for p in parts] == [3, 2, 2]
    assert torch.cat([p.labels for p in parts if p.labels is not None]).tolist() == list(range(7))


def test_what_does_not_fit_is_refused() -> None:
    chain = _chain()
    with pytest.raises(SpecError, match="2 rows cannot be cut into 3 microbatches"):
        chain.cut(torch.zeros(2, 3), None, 3)
    with pytest.raises(SpecError, match="equally many rows"):
        chain.cut(torch.zeros(2, 3), torch.zeros(4), 1)
    (part,) = chain.cut(torch.zeros(2, 5), None, 1)
    with pytest.raises(SpecError, match=r"layer 0 cannot run on \[2, 5\] of torch.float32"):
        chain.activations(part)
    with pytest.raises(SpecError, match="layers that are modules"):
        ModuleChain([], nn.functional.mse_loss)
    with pytest.raises(SpecError, match="must be a mean"):
        ModuleChain([nn.Linear(1, 1)], nn.CrossEntropyLoss(reduction="sum"))


WEIGHTS = torch.tensor([0.1, 1.0, 2.0, 0.5])


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(weight=WEIGHTS),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        functools.partial(nn.functional.cross_entropy, weight=WEIGHTS, ignore_index=2),
        nn.NLLLoss(weight=WEIGHTS, ignore_index=1),
    ],
)
def test_parts_of_a_batch_have_the_mean_of_the_whole(loss_fn: Any) -> None:
    torch.manual_seed(0)
    chain = ModuleChain([nn.Linear(3, 4)], loss_fn)
    x, labels = torch.randn(7, 3), torch.tensor([0, 1, 2, 3, 1, 2, 3])
    labels[-1] = loss_fn.keywords["ignore_index"] if hasattr(loss_fn, "keywords") else loss_fn.ignore_index
    parts = chain.cut(x, labels, 3)
    assert len(chain.activations(parts[0])) == 2
    total = sum(chain.loss(chain.run(0, (), part), part) for part in parts)
    whole = loss_fn(chain.units[0](x), labels)
    assert float(total.detach() / sum(map(chain.counted, parts))) == pytest.approx(float(whole.detach()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loss_fn", [nn.MSELoss(reduction="sum"), functools.partial(nn.functional.mse_loss, reduction="none")]
)
def test_a_loss_that_is_no_mean_is_refused(loss_fn: Any) -> None:
    with pytest.raises(SpecError, match="must be a mean"):
        ModuleChain([nn.Linear(3, 4)], loss_fn)


def test_losses_that_would_train_nothing_or_the_wrong_thing_are_refused() -> None:
    x, labels = torch.randn(4, 3), torch.tensor([0, 1, -100, 2])
    several = ModuleChain([nn.Linear(3, 4)], lambda y, given: nn.functional.cross_entropy(y, given, reduction="none"))
    with pytest.raises(SpecError, match="pass counted="):
        several.counted(several.cut(x, labels, 1)[0])
    for loss_fn, words in (
        (lambda y, given: (y - given).square(), r"a tensor of shape \[4, 4\]"),
        (lambda y, given: (y.detach() - given).square().mean(), "has no gradient"),
    ):
        chain = ModuleChain([nn.Linear(3, 4)], loss_fn)
        (part,) = chain.cut(x, x.new_zeros(4, 4), 1)
        chain.activations(part)
        with pytest.raises(SpecError, match=words):
            chain.loss(chain.run(0, (), part), part)


def test_infinities_where_no_label_counts_do_not_matter() -> None:
    chain = ModuleChain([nn.Linear(3, 4)], nn.functional.cross_entropy)
    (part,) = chain.cut(torch.randn(2, 3), torch.tensor([-100, -100]), 1)
    chain.activations(part)
    y = torch.full((2, 4), torch.inf, requires_grad=True)
    loss = chain.loss((y,), part)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    assert y.grad is not None
    assert not y.grad.any()


def test_layers_may_be_replaced_and_compiled() -> None:
    root = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    chain = ModuleChain(root, nn.functional.mse_loss)
    root[0] = nn.Identity()
    chain.look()
    assert chain.units == tuple(root)
    root.append(nn.Identity())
    with pytest.raises(SpecError, match="3 layers now"):
        chain.look()
    compiled = ModuleChain([torch.compile(nn.Linear(3, 2), backend="eager")], nn.functional.mse_loss)  # type: ignore[list-item]
    assert compiled.activations(compiled.cut(torch.randn(4, 3), None, 1)[0])[-1][0].shape == (4, 2)
