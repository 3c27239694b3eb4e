"""Which feed-forward modules are recognised, as what, and that numbers move there and back unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import prophet
from prophet.convert import RowOrder, original_state_dict
from prophet.convert.trials.probe import activation_of, gate_of, identify
from prophet.errors import ConversionError, SpecError
from prophet.kernels.grouped_ffn.naive import expert_ffn
from prophet.spec import ACTIVATIONS, Activation, activation_named, bias_of, has_biases, parts_of

D, H = 6, 10


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class Two(nn.Module):
    """Two layers with any function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor], b_in: bool, b_out: bool, out: int = D) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, H, bias=b_in), nn.Linear(H, out, bias=b_out)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.function(self.fc1(x)))


class Three(nn.Module):
    """Gate and `up` apart; the layer down is registered first."""

    def __init__(self, function: Callable[[Tensor], Tensor], b_in: bool, b_out: bool, out: int = D) -> None:
        super().__init__()
        self.down = nn.Linear(H, out, bias=b_out)
        self.up, self.gate = nn.Linear(D, H, bias=b_in), nn.Linear(D, H, bias=b_in)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.function(self.gate(x)))


class Fused(nn.Module):
    """Gate and `up` in one layer, in any order."""

    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor], rows: RowOrder, bias: bool = True) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(D, 2 * H, bias=bias), nn.Linear(H, D)
        self.combine, self.rows = combine, rows

    def forward(self, x: Tensor) -> Tensor:
        h = self.both(x)
        gate, up = (h[:, ::2], h[:, 1::2]) if self.rows.interleaved else (h[:, :H], h[:, H:])
        return self.down(self.combine(up, gate) if self.rows.up_first else self.combine(gate, up))


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(gate * 1.702) * (up + 1)


def check(expert: nn.Module, wanted: Activation) -> None:
    names, activation = identify(expert)
    assert activation == wanted
    state = dict(expert.named_parameters())
    assert sorted(names.all()) == sorted(state)
    weights = names.unpack(state, "")
    x = 3 * torch.randn(9, D, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(expert_ffn(x, weights, activation), expert(x))
    back = names.pack(weights, "3.")
    assert {n: t.shape for n, t in back.items()} == {f"3.{n}": t.shape for n, t in state.items()}
    assert all(torch.equal(back[f"3.{n}"], t) for n, t in state.items())


PLAIN: dict[Activation, Callable[[Tensor], Tensor]] = {
    "identity": nn.Identity(),
    "relu": nn.ReLU(),
    "relu2": lambda h: F.relu(h) ** 2,
    "gelu": nn.GELU(),
    "gelu_tanh": new_gelu,
    "silu": nn.SiLU(),
    "quick_gelu": quick,
}
GATES: dict[Activation, Callable[[Tensor], Tensor]] = {
    "reglu": F.relu,
    "geglu": F.gelu,
    "geglu_tanh": nn.GELU(approximate="tanh"),
    "swiglu": F.silu,
    "quick_geglu": quick,
}
BIASES = list(itertools.product((True, False), repeat=2))


def test_every_activation_is_tried_below() -> None:
    assert {*PLAIN, *GATES, "swiglu_clamped"} == set(ACTIVATIONS)


@pytest.mark.parametrize("name", PLAIN)
def test_two_layers(name: Activation) -> None:
    b_in, b_out = BIASES[list(PLAIN).index(name) % 4]
    check(Two(PLAIN[name], b_in, b_out, out=D + list(PLAIN).index(name) % 3), name)


@pytest.mark.parametrize("name", GATES)
def test_a_gate_apart(name: Activation) -> None:
    b_in, b_out = BIASES[list(GATES).index(name) % 4]
    check(Three(GATES[name], b_in, b_out, out=D + list(GATES).index(name) % 3), name)


@pytest.mark.parametrize("rows", [RowOrder(up_first=u, interleaved=i) for u, i in BIASES], ids=str)
@pytest.mark.parametrize("name", ["geglu", "swiglu_clamped"])
def test_a_gate_beside_up(name: Activation, rows: RowOrder) -> None:
    check(Fused(clamped if name == "swiglu_clamped" else lambda g, u: F.gelu(g) * u, rows, bias=rows.up_first), name)


@pytest.mark.parametrize("size", [(6, 10), (10, 6), (6, 6)])
def test_layers_are_told_apart_whatever_their_sizes(size: tuple[int, int]) -> None:
    dim, hidden = size
    expert = nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
    names, activation = identify(expert)
    assert (names.w_in, names.w_out, activation) == (("0.weight",), "2.weight", "silu")


class OneBias(Three):
    """A bias of the gate alone, which w_in has no place for."""

    def __init__(self) -> None:
        super().__init__(F.silu, True, True)
        self.up.bias = None


@pytest.mark.parametrize(
    ("expert", "text"),
    [
        (Two(torch.tanh, True, True), "its output is not that of"),
        (Three(torch.sigmoid, True, True), "its output is not that of"),
        (OneBias(), "its output is not that of"),
        (nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Dropout(0.01), nn.Linear(H, D)), "its output is not that of"),
        (nn.Sequential(nn.LayerNorm(D, elementwise_affine=False), nn.Linear(D, H), nn.Linear(H, D)), "its output is"),
        (nn.Sequential(nn.Linear(D, H), nn.LayerNorm(H), nn.Linear(H, D)), "other parameters .'1.weight', '1.bias'"),
        (nn.Linear(D, D), "two linear layers, or three where it is gated, got 1"),
        (nn.Sequential(nn.Linear(D, H), nn.Flatten(0), nn.Linear(H, D)), r"it cannot be called with rows \[64, 6\]"),
    ],
)
def test_what_is_something_else_is_refused(expert: nn.Module, text: str) -> None:
    """Also in evaluation mode, where a dropout does nothing yet."""
    with pytest.raises(ConversionError, match=text):
        identify(expert.eval())
    assert not expert.training


def test_trying_leaves_the_random_state_and_the_module_as_they_were() -> None:
    expert = nn.Sequential(nn.Linear(D, H), nn.Dropout(0.0), nn.ReLU(), nn.Linear(H, D)).eval()
    before, state = torch.get_rng_state(), [p.clone() for p in expert.parameters()]
    assert identify(expert)[1] == "relu"
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(expert.parameters(), state, strict=True))


@pytest.mark.parametrize("name", [*PLAIN, *GATES])
def test_a_function_has_a_name(name: Activation) -> None:
    gated = parts_of(name).gated
    assert activation_of((GATES if gated else PLAIN)[name], "act", gated=gated) == name


@pytest.mark.parametrize(("function", "got"), [(torch.tanh, "tanh"), (None, "NoneType"), (nn.Mish(), "Mish")])
def test_a_function_without_a_name_is_refused(function: object, got: str) -> None:
    with pytest.raises(
        ConversionError, match=f"act: expected one of relu, .*, silu, quick_gelu in gated experts, got {got}"
    ):
        activation_of(function, "act", gated=True)


# --- a function of gate and up ---


def gate(
    function: Callable[[Tensor], Tensor], limit: float | None = None, *, plus_one: bool = False
) -> Callable[[Tensor], Tensor]:
    """What models write between their two products, the gate in front."""

    def apply(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return function(gate) * (up + 1.0) if plus_one else up * function(gate)

    return apply


def in_float32(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda h: function(h.float()).to(h.dtype)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("limit", [None, 0.5, 7.0, 10, 500.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_gate_is_found(name: Activation, plus_one: bool, limit: float | None, rounded: bool) -> None:
    function = gate(GATES[name], limit, plus_one=plus_one)
    found = gate_of(in_float32(function) if rounded else function, "act", hidden=3, limits=(7.0, 0.5, 500.0, 10.0))
    assert (found.function, found.gated) == (parts_of(name).function, True)
    assert (found.limit, found.plus_one) == (limit, plus_one)
    assert parts_of(activation_named(found)) == found


class Gate(nn.Module):
    """A module whose method is the function."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(chance)

    def apply_gate(self, h: Tensor) -> Tensor:
        return self.drop(gate(F.silu, 7.0)(h))


def switched(h: Tensor) -> Tensor:
    """The halves the other way round."""
    return gate(F.silu)(h.roll(h.shape[-1] // 2, dims=-1))


def in_turns(h: Tensor) -> Tensor:
    return F.silu(h[..., ::2]) * h[..., 1::2]


def bounded_below(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate.clamp(-7, 7)) * up.clamp(-7, 7)


def bounded_afterwards(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=7) * up.clamp(-7, 7)


def bounded_gate(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=7)) * up


def normed(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.layer_norm(F.silu(gate) * up, gate.shape[-1:])


@pytest.mark.parametrize(
    "function",
    [
        gate(torch.tanh),
        gate(F.silu, 6.9),  # a limit that nobody named
        gate(F.silu, 7.0001),
        gate(F.silu, 2000.0),
        gate(lambda g: g * torch.sigmoid(1.7 * g), 7.0),
        gate(lambda g: (1 + 1e-6) * F.silu(g), 7.0),  # as little as float32 rounds, in float64
        gate(lambda g: F.silu(g.bfloat16()).double()),
        in_float32(gate(F.silu, 7.001)),
        bounded_below,
        bounded_afterwards,
        in_float32(bounded_afterwards),
        bounded_gate,
        in_float32(bounded_gate),
        normed,
        switched,
        in_turns,
        lambda h: gate(F.silu)(h)[:1],
        lambda h: gate(F.silu)(h) + 1e-3 * torch.randn(h.shape[-1] // 2).double(),
        lambda h: gate(F.silu)(h) * torch.nan,
        Gate(0.01).eval().apply_gate,
        lambda h: h.nothing,
        lambda h: None,
        F.linear,
        None,
    ],
)
def test_what_is_no_gate_is_refused(function: object) -> None:
    with pytest.raises(
        ConversionError, match=r"act: expected f\(gate\) \* up or f\(gate\) \* \(up \+ 1\), .* \[7.0, 10.0\]"
    ):
        gate_of(function, "act", limits=(7.0, 10.0))


def test_asking_for_a_gate_leaves_the_modules_and_the_random_state_as_they_were() -> None:
    module = Gate(0.0).eval()
    before = torch.get_rng_state()
    assert activation_named(gate_of(module.apply_gate, "act", limits=(7.0,))) == "swiglu(limit=7)"
    assert not module.drop.training
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("b_in", "b_out"), BIASES)
def test_biases_have_a_name(b_in: bool, b_out: bool) -> None:
    expert = Two(F.relu, b_in, b_out)
    weights = identify(expert)[0].unpack(dict(expert.named_parameters()), "")
    wanted = {(True, True): True, (False, False): False, (True, False): "in", (False, True): "out"}
    assert bias_of(weights.b_in, weights.b_out) == wanted[b_in, b_out]
    assert has_biases(wanted[b_in, b_out]) == (b_in, b_out)


def test_a_bias_that_is_none_of_the_four_is_refused() -> None:
    with pytest.raises(SpecError, match="bias must be True, False, 'in' or 'out', got 'both'"):
        has_biases("both")  # type: ignore[arg-type]


# --- names in a state dict ---


class Block(nn.Module):
    """Top-2 of four experts, by a loop."""

    def __init__(self, expert: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 4)
        self.experts = nn.ModuleList(expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(dim=-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            at, place = torch.where(ids == e)
            if len(at):
                y[at] += weights[at, place, None] * expert(x[at])
        return y


@pytest.mark.parametrize(
    "expert",
    [
        lambda: Two(F.silu, True, False),
        lambda: Two(F.relu, False, True),
        lambda: Three(F.gelu, True, False),
        lambda: Fused(lambda g, u: F.gelu(g) * u, RowOrder()),
        lambda: Fused(lambda g, u: F.gelu(g) * u, RowOrder(up_first=True)),
        lambda: Fused(lambda g, u: F.gelu(g) * u, RowOrder(interleaved=True), bias=False),
    ],
)
def test_a_key_of_the_original_holds_the_original(expert: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(Block(expert))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = prophet.convert(model)
    assert report.replaced[0].spec.bank == "feed-forward"
    for now in (model.state_dict(), original_state_dict(model)):
        assert list(now) == list(before)
        assert all(torch.equal(now[n], v) for n, v in before.items())
