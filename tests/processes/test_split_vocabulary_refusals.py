"""What a split of the vocabulary would get wrong is refused by name on all ranks, or is as with the whole one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

pytest.importorskip("transformers", reason="some of the models are transformers'")

import transformers

from pipeline_balance.pipeline.model.vocabulary import IGNORED
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, TransitionError
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_models import adam, batch_of, model_of, no_update

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
WORDS, WIDTH = 16, 8


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    inner = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *inner, nn.Linear(WIDTH, WORDS)).double()


def chain(model: nn.Module, loss: Any = F.cross_entropy, **options: Any) -> ElasticPipeline:
    given = {"split_vocabulary": True, "make_optimizer": adam, "microbatches": 2, "timeout_s": 30.0, **options}
    return ElasticPipeline.from_modules(model, loss, **given)


def words(most: int = WORDS) -> tuple[Tensor, Tensor]:
    ids = torch.randint(most, (16,), generator=torch.Generator().manual_seed(0))
    return ids, (ids * 3 + 1) % most


def weights() -> Tensor:
    """Other than 1 only for few words."""
    found = torch.ones(WORDS, dtype=torch.float64)
    found[[3, 9]] = 0.1
    return found


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits, labels, reduction="none")
    counts = labels != IGNORED
    loss: Tensor = torch.where(counts, each * weights()[labels.clamp(min=0)], 0.0).sum() / counts.sum()
    return loss


def llama(model: Any = None, **options: Any) -> ElasticPipeline:
    given = {"split_vocabulary": True, "make_optimizer": adam, "microbatches": 2, "timeout_s": 30.0, **options}
    return ElasticPipeline.from_transformers(model if model is not None else model_of("llama"), **given)


class Wrapped(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.more = base, nn.Linear(base.in_features, base.out_features, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.more(x)


class Looks(nn.Module):
    """A layer that reads the embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.embedding.weight.T).softmax(-1) @ self.embedding.weight


class Columns(torch.optim.Optimizer):
    """Keeps as many numbers as a matrix has columns, which here are as many as a rank's rows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["columns"] = p.grad.detach().reshape(-1, p.shape[-1]).mean(0)


def columns(named: Any) -> torch.optim.Optimizer:
    return Columns([p for _, p in named])


def adafactor(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for _, p in named])


def odd_llama(how: str) -> Any:
    """A llama whose own forward has something that its head or embedding does not show."""

    class Odd(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = nn.Parameter(torch.tensor(0.7))
            self.extra = nn.Parameter(torch.linspace(-2, 2, config.vocab_size))

        def forward(self, input_ids: Any = None, labels: Any = None, **given: Any) -> Any:
            ids = torch.where(input_ids % 2 == 0, 3, input_ids) if how == "words" else input_ids
            logits = self.lm_head(self.model(ids, **given)[0])
            logits = logits * self.scale.exp() if how == "scale" else logits
            logits = logits + self.extra if how == "extra" else logits
            loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    torch.manual_seed(0)
    return Odd(model_of("llama").config).double()


def narrow_opt() -> Any:
    given = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 40, "num_attention_heads": 4}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**given, word_embed_proj_dim=16, pad_token_id=0)).double()


def after(what: Any, *, transformer: bool = True) -> None:
    """A step once `what` has changed the model of a pipeline."""
    model = model_of("llama") if transformer else layers()
    pipe = llama(model) if transformer else chain(model)
    what(model)
    pipe.step(*(batch_of() if transformer else words()))


def changed_gradient() -> None:
    pipe = chain(model := layers())
    pipe.step(*words())
    weight: Any = model[-1].weight
    weight.grad = torch.ones_like(weight)
    pipe.step(*words())


def kept(make_optimizer: Any) -> None:
    pipe = chain(layers(), make_optimizer=make_optimizer)
    pipe.step(*words())
    pipe.rebuild(StageMap((0, 3, 5), (1, 0)))


def tied_layer() -> None:
    embedding = nn.Embedding(WORDS, WIDTH)
    inner = [nn.Linear(WIDTH, WIDTH), Looks(embedding)]
    chain(nn.Sequential(embedding, *inner, nn.Linear(WIDTH, WORDS)).double()).step(*words())


def embeds() -> None:
    labels = batch_of()[1]
    given = {"inputs_embeds": torch.zeros(*labels.shape, 32, dtype=torch.float64)}
    llama().step(given, labels)


def drop(grad: Tensor) -> Tensor:
    return 0 * grad


def odd(how: str) -> None:
    llama(odd_llama(how)).step(*batch_of())


REFUSED: dict[str, tuple[Any, str]] = {
    "class weights": (
        lambda: chain(layers(), nn.CrossEntropyLoss(weight=weights())),
        "CrossEntropyLoss is another one: it has",
    ),
    "smoothed labels": (
        lambda: chain(layers(), nn.CrossEntropyLoss(label_smoothing=0.1)),
        "CrossEntropyLoss is another one: it has",
    ),
    "weights of its own": (lambda: chain(layers(), weighted, counted=len).step(*words()), "is another one"),
    "scaled logits": (lambda: odd("scale"), "reads scale behind its head"),
    "added to logits": (lambda: odd("extra"), "reads extra behind its head"),
    "other words": (lambda: odd("words"), "looks up other words"),
    "gradient hook": (lambda: after(lambda m: m.lm_head.weight.register_hook(drop)), "runs no hooks"),
    "hook of sums": (
        lambda: after(lambda m: m.model.embed_tokens.weight.register_post_accumulate_grad_hook(drop)),
        "runs no hooks",
    ),
    "module hook": (lambda: after(lambda m: m[-1].register_forward_hook(drop), transformer=False), "runs no hooks"),
    "hook of the model": (lambda: after(lambda m: m.register_forward_hook(drop)), "forward hooks of the model"),
    "backward hook": (lambda: after(lambda m: m.lm_head.register_full_backward_pre_hook(drop)), "runs no hooks"),
    "wrapped": (lambda: after(lambda m: setattr(m, "lm_head", Wrapped(m.lm_head))), "lm_head was replaced"),
    "pruned": (
        lambda: after(lambda m: prune.random_unstructured(m.lm_head, "weight", 0.5)),
        "Linear was changed",
    ),
    "layer with it": (tied_layer, "a layer holds 0.weight, too"),
    "vectors for words": (embeds, "needs words as the main input, got inputs_embeds"),
    "projected": (lambda: llama(narrow_opt()), r"the head of OPTForCausalLM gets \[3, 5, 16\]"),
    "adafactor": (lambda: kept(adafactor), "Adafactor computes with whole matrices"),
    "columns": (lambda: kept(columns), r"0.weight@columns is \[8\]"),
    "gradient of its own": (changed_gradient, "gradients of 4.weight were changed"),
}


def _refusals(rank: int, size: int) -> dict[str, str]:
    found = {}
    for name, (call, _) in REFUSED.items():
        try:
            call()
            found[name] = "nothing"
        except (SpecError, TransitionError) as error:
            found[name] = str(error)
    return found


def test_what_a_split_would_get_wrong_is_refused_on_all_ranks() -> None:
    said = run_gloo(_refusals, 2, timeout_s=120.0)
    for name, (_, wanted) in REFUSED.items():
        for mine in said:
            assert re.search(wanted, mine[name]), (name, mine[name])


def _like_whole(rank: int, size: int) -> tuple[dict[str, list[float]], bool]:
    """Losses of second steps, without a split and with it; whether logits are left of an evaluation."""
    found: dict[str, list[float]] = {"padded": [], "recomputed": []}
    left = True
    for split in (False, True):
        model = layers()
        bias: Any = model[-1].bias
        with torch.no_grad():
            bias[WORDS // 2 :] = -torch.inf
        padded = chain(model, split_vocabulary=split, make_optimizer=no_update)
        again = llama(model_of("llama", recompute=True), split_vocabulary=split)
        for name, pipe, batch in (("padded", padded, words(WORDS // 2)), ("recomputed", again, batch_of())):
            pipe.step(*batch)
            found[name].append(pipe.step(*batch))
        padded.evaluate(*words(WORDS // 2))
        executor = padded.stages.executor
        assert executor is not None
        left = executor.vocabulary is not None and executor.vocabulary.head._left is not None
    return found, left


def test_padding_of_a_vocabulary_and_checkpointing_are_as_with_the_whole() -> None:
    for found, left in run_gloo(_like_whole, 2, timeout_s=120.0):
        for whole, split in found.values():
            assert split == pytest.approx(whole, rel=1e-10)
        assert not left
