"""record(model, path): what a model's routers choose, as a routing trace for `prophet plan`. Nothing is converted.

Shape legend: T steps, L layers, R would-be ranks, E experts, P passes between two copies from the device.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from prophet.convert.base import Adapter, ExpertsSpec, is_integer
from prophet.convert.find import Found, find_all, nothing_found, standard_adapters
from prophet.convert.seen import Hook, Pass, Seen
from prophet.errors import ConversionError, TraceError
from prophet.layer.moe import MoE
from prophet.ranks.process_group import process_rank
from prophet.spec import checked
from prophet.traces import TraceWriter

# Bytes of counts that wait on the device before they are written
MOST_BYTES = 1 << 24
# Steps that wait there: so many are lost if the process is killed, and the device waits once for as many.
MOST_STEPS = 64
_CONFIG = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocabulary": "vocab_size",
}
_DENSE_HIDDEN = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size")
# Files that this process is recording
_under_way: set[Path] = set()


@checked
def record(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    ranks: int = 8,
    experts: str | Sequence[str] | None = None,
    adapters: Sequence[Adapter] = (),
    training_only: bool = False,
) -> Recording:
    """Record what the model's routers choose, into a routing trace that `prophet plan` reads:

    >>> with prophet.record(model, "routing.npz", ranks=8):     # doctest: +SKIP
    ...     train(model)

    A forward pass of `model` is one would-be rank's microbatch, and `ranks` passes in a row are one step of the trace.
    So one process records what that many ranks would route. What activation checkpointing computes again does not
    count, nor what runs outside of a pass of `model`. Nothing is converted: outputs, gradients, random state and state
    dict stay what they are, and the hooks are gone afterwards.

    The file appears when the `with` block ends, also by an error or Ctrl-C: then with the steps that were whole. Under
    `torch.distributed` process 0 records its own passes, and the others nothing; no process waits for another.

    Args:
        model: what is called; wrapped in DistributedDataParallel or not, but not compiled.
        path: the file, `*.npz`.
        ranks: R, a divisor of the number of experts.
        experts: names of lists of experts, as for `prophet.convert`; None takes those that are found.
        adapters: for blocks of your own, as for `prophet.convert`.
        training_only: leave out passes in evaluation mode.

    Raises:
        ConversionError: where no block is found, one cannot be read, or the blocks have different sizes.
        TraceError: where the file cannot be written or is being recorded already; at the end, for fewer passes than
            ranks. Nothing is written then.
        ValueError: for a number of ranks that does not divide that of the experts, and arguments of the wrong kind.
    """
    patterns = [experts] if isinstance(experts, str) else experts
    if ranks < 1:
        raise ValueError(f"ranks: expected a whole number of at least 1, got {ranks}")
    # Converted blocks too, which no adapter can describe
    if any(isinstance(m, MoE) for m in model.modules()):
        raise ConversionError(
            "the model's MoE layers are prophet.MoE already: prophet.monitor(engine, folder) writes what they route"
        )
    # As one rank of one: a recording needs no group, and any number of experts is fine.
    found, left = find_all(model, (*adapters, *standard_adapters()), patterns, 0, 1, _describe)
    if not found:
        raise ConversionError(nothing_found(model, left))
    _check_one_size(model, found)
    # All blocks have one size, as was checked
    total = found[0].spec.num_experts
    if total % ranks:
        fits = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        raise ValueError(f"ranks: expected a divisor of the {total} experts ({fits}), got {ranks}")
    return Recording(model, Path(path), ranks, found, training_only)


def _describe(name: str, adapter: Adapter, block: nn.Module, ranks: int) -> ExpertsSpec:
    """Describe a block that stays as it is, so little is asked of it."""
    try:
        return adapter.describe(block)
    except ValueError as error:
        raise ConversionError(f"{name} ({adapter.family}): {error}") from error


def _check_one_size(model: nn.Module, found: Sequence[Found]) -> None:
    by_size: dict[str, str] = {}
    for f in found:
        by_size.setdefault(f.spec.signature(), f.name)
    if len(by_size) > 1:
        sizes = "; ".join(f"{name or 'the model'} has {size}" for size, name in by_size.items())
        raise ConversionError(f"{type(model).__name__}: expected MoE blocks of one size, which a trace has: {sizes}")


class Recording:
    """A recording that is under way inside its `with` block; made by `prophet.record`.

    Attributes:
        path: The file that appears at the end.
        ranks: R, passes that make one step.
        passes: Whole ones so far.

    Args:
        model: What is called.
        path: The file, `*.npz`.
        ranks: R, a divisor of the number of experts.
        found: The blocks to record.
        training_only: Leave out passes in evaluation mode.
    """

    def __init__(
        self, model: nn.Module, path: Path, ranks: int, found: Sequence[Found], training_only: bool = False
    ) -> None:
        self.path, self.ranks, self.passes = path, ranks, 0
        self._model, self._found, self._training_only = model, found, training_only
        self._name = type(unwrapped(model)).__name__
        experts = found[0].spec.num_experts
        # Counts are int64, eight bytes each
        waiting = max(1, min(MOST_STEPS * ranks, MOST_BYTES // (8 * len(found) * experts)))
        self._waiting, self._now = waiting, Pass()
        self._seen = [Seen(f.name, experts, waiting, self._now) for f in found]
        # The step that is not whole yet, [L, R, E]
        self._step = np.zeros((len(found), ranks, experts), dtype=np.int64)
        self._filled = self._tokens = self._sequence = 0
        self._hooks: list[Any] = []
        self._writer: TraceWriter | None = None

    @property
    def steps(self) -> int:
        """Steps that are whole."""
        return self.passes // self.ranks

    # --- the with block ---

    def __enter__(self) -> Self:
        if self._hooks or self.passes:
            raise RuntimeError(f"{self.path}: a recording is made once: call prophet.record again")
        # The working directory may be another one at the end
        self.path = self.path.absolute()
        # all processes count passes, so that all end with the same error if they are too few
        writes = process_rank() == 0
        if writes:
            self._writer = self._opened()
        try:
            self._hang_up(writes)
        except BaseException:
            self._take_down()
            if self._writer is not None:
                self._writer.discard()
                _under_way.discard(self._file)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_down()
        writer, problem = self._writer, self._problem()
        if writer is not None:
            _under_way.discard(self._file)
        try:
            if writer is not None and not problem:
                self._flush()
        # The block's own error matters more than a count that did not reach the file.
        except Exception:
            if error is None:
                raise
        finally:
            if writer is not None and writer.steps and not problem:
                writer.meta.update(self._meta())
                writer.close()
            elif writer is not None:
                writer.discard()
        if error is None and problem:
            raise TraceError(f"{self.path}: {problem}: nothing was written")
        if error is None and (rest := self.passes % self.ranks):
            warnings.warn(
                f"{self.path}: {rest} of {self.ranks} passes of the last step came, so it was left out", stacklevel=2
            )

    def _opened(self) -> TraceWriter:
        if self.path.suffix.lower() != ".npz" or self.path.is_dir():
            kind = "a folder" if self.path.is_dir() else f"a name that ends in {self.path.suffix or 'no suffix'}"
            raise TraceError(f"{self.path}: expected a file whose name ends in .npz, got {kind}")
        self._file = self.path.resolve()
        if self._file in _under_way:
            raise TraceError(f"{self.path}: expected a file of its own, got that of a recording that has not ended")
        layers, ranks, experts = self._step.shape
        try:
            writer = TraceWriter(
                self.path, layers=layers, ranks=ranks, experts=experts, meta=sizes_of(self._model, self._found)
            )
        except OSError as error:
            raise TraceError(f"{self.path}: expected a place to write to: {error.strerror or error}") from error
        _under_way.add(self._file)
        return writer

    def _hang_up(self, writes: bool) -> None:
        """Hang up hooks so that a pass begins before, and ends after, all that its blocks report."""
        # Hooks of one module run in the order in which they were hung up, which matters where the block is the model.
        self._hooks.append(self._model.register_forward_pre_hook(Hook(self._begins), with_kwargs=True))
        for f, seen in zip(self._found, self._seen, strict=True) if writes else ():
            try:
                f.adapter.watch(f.block(self._model), f.experts(self._model), seen)
            except ValueError as error:
                raise ConversionError(f"{f.name} ({f.adapter.family}): {error}") from error
        self._hooks.append(self._model.register_forward_hook(Hook(self._ends)))

    def _take_down(self) -> None:
        for hook in (*self._hooks, *(h for seen in self._seen for h in seen.hooks)):
            hook.remove()
        self._hooks.clear()
        if self._now.running:
            self._forget()

    # --- passes ---

    def _begins(self, model: nn.Module, args: Any, named: Any) -> None:
        # Activation checkpointing calls the whole model again inside a backward pass.
        if torch._C._current_graph_task_id() != -1:
            return
        # No end came: the last pass has failed
        if self._now.running:
            self._forget()
        if self._training_only and not model.training:
            return
        self._now.running, self._now.tokens = True, 0
        # Only token ids [B, S] say how long a sequence is; embeddings do not have to be [B, S, D].
        ids = next((x for x in tree_leaves((args, named)) if isinstance(x, Tensor)), None)
        if ids is not None and ids.ndim == 2 and is_integer(ids):
            self._sequence = max(self._sequence, ids.shape[1])

    def _forget(self) -> None:
        self._now.running = False
        for seen in self._seen:
            seen.forget()

    def _ends(self, *_: Any) -> None:
        if not self._now.running or torch._C._current_graph_task_id() != -1:
            return
        for seen in self._seen:
            seen.end()
        self._now.running = False
        self._now.row += 1
        self._tokens += self._now.tokens
        self.passes += 1
        if self._now.row == self._waiting:
            self._flush()

    def _flush(self) -> None:
        """Bring the counts of the last passes to the host, and write the steps that are whole."""
        rows, self._now.row = self._now.row, 0
        if self._writer is None or not rows:
            return
        for counts in np.stack([seen.take() for seen in self._seen], axis=1)[:rows]:
            self._step[:, self._filled] = counts
            self._filled += 1
            if self._filled == self.ranks:
                self._writer.append(self._step)
                self._filled = 0

    # --- what the file says beside the counts ---

    def _problem(self) -> str:
        """Why there is nothing to write, or an empty text."""
        if self.passes < self.ranks:
            return (
                f"expected at least {self.ranks} forward passes of {self._name}, one for each of ranks={self.ranks}, "
                f"got {self.passes}"
            )
        blind = [seen.name or "the model" for seen in self._seen if not seen.calls]
        if blind and self._writer is not None:
            return (
                f"in {self.passes} passes {blind[0]} was never seen to choose an expert: record before torch.compile, "
                f"and give an adapter of your own a watch() if its experts are not called with the choices"
            )
        return ""

    def _meta(self) -> dict[str, Any]:
        """Sizes that only the passes show."""
        meta: dict[str, Any] = {"tokens": max(1, round(self._tokens / self.passes))}
        if self._sequence:
            meta["sequence"] = self._sequence
        # Counted, as some routers choose a number of experts that no config names.
        if most := max(seen.most_per_token for seen in self._seen):
            meta["top_k"] = most
        return meta


# --- sizes, under the names that `prophet.machine.sizes.ModelSizes` has for them ---


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model, without what torch and DeepSpeed put around it."""
    inner = getattr(model, "module", None)
    if type(model).__module__.split(".")[0] in ("torch", "deepspeed") and isinstance(inner, nn.Module):
        return unwrapped(inner)
    return model


def sizes_of(model: nn.Module, found: Sequence[Found]) -> dict[str, Any]:
    """The model's sizes as its modules and a Hugging Face config give them; unknown ones are left out."""
    spec, inner = found[0].spec, unwrapped(model)
    layers, dense_params = _blocks(model, inner, found)
    first = next(found[0].experts(model).parameters())
    meta: dict[str, Any] = {
        "model": type(inner).__name__,
        "source": "prophet.record",
        "dim": spec.dim,
        "experts": spec.num_experts,
        "dtype": str(first.dtype).removeprefix("torch."),
        "layers": layers or len(found),
        "moe_layers": len(found),
        "dense_params": dense_params,
    }
    # Where it is unknown here, the passes show it
    if spec.top_k:
        meta["top_k"] = spec.top_k
    if spec.hidden:
        meta |= {"hidden": spec.hidden, "activation": spec.activation, "bias": bool(spec.bias)}
    config: Any = getattr(inner, "config", None)
    if callable(getattr(config, "get_text_config", None)):
        config = config.get_text_config()
        for name, field in _CONFIG.items():
            value = getattr(config, field, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                meta[name] = value
        # A part of a model may have fewer layers than its config says
        if layers:
            meta["layers"] = layers
        if layers > len(found):
            widths = (getattr(config, field, None) for field in _DENSE_HIDDEN)
            if width := next((w for w in widths if isinstance(w, int) and w > 0), 0):
                meta["dense_hidden"] = width
        latent = [getattr(config, f"{part}_head_dim", None) for part in ("qk_nope", "qk_rope", "v")]
        known = [size for size in latent if isinstance(size, int)]
        # Latent attention: scores and values of a head have different sizes, whose mean gives the same work.
        if len(known) == len(latent):
            meta["head_dim"] = sum(known) // 2
    return meta


def _blocks(model: nn.Module, inner: nn.Module, found: Sequence[Found]) -> tuple[int, int]:
    """Count the model's blocks (0: unknown), and the weights beside the experts in a block that has experts.

    Without embeddings, the output head, norms, biases and routers, as in the sizes that a config gives. Where no list
    of blocks is found, the weights are those of the whole model, divided by its MoE layers.
    """
    apart = {id(p) for f in found for p in f.experts(model).parameters()} | _ids_of_vocabulary(inner)
    for f in found:
        router = {(f.spec.num_experts, f.spec.dim), (f.spec.dim, f.spec.num_experts)}
        # By shape, as routers have no common name
        apart |= {id(p) for p in f.holder(model).parameters() if p.shape in router}

    def beside(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p.ndim > 1 and id(p) not in apart)

    listed = _list_of_blocks(model, [f.where.split(".") for f in found])
    if listed is not None:
        blocks, numbers = listed
        # a list of MoE layers alone has nothing beside: attention is elsewhere in the model
        if weights := sum(beside(blocks[i]) for i in numbers) // len(found):
            return len(blocks), weights
    return 0, beside(inner) // len(found)


def _list_of_blocks(model: nn.Module, paths: Sequence[Sequence[str]]) -> tuple[nn.ModuleList, list[int]] | None:
    """The innermost list of which all modules of these paths are in separate entries, and the entries' numbers."""
    # Innermost first: a model may keep its blocks in lists of lists
    for end in reversed(range(1, len(paths[0]) - 1)):
        blocks = model.get_submodule(".".join(paths[0][:end]))
        if isinstance(blocks, nn.ModuleList) and all(len(p) > end + 1 and p[:end] == paths[0][:end] for p in paths):
            numbers = [int(p[end]) for p in paths]
            if len(set(numbers)) == len(numbers):
                return blocks, numbers
    return None


def _ids_of_vocabulary(model: nn.Module) -> set[int]:
    """Object ids of the weights of embeddings and the output head."""
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    apart = {id(w) for w in embeddings}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        apart |= {id(p) for p in head.parameters()}
    # Without that method, take the linear layer that has the shape of the vocabulary's embedding.
    elif embeddings:
        largest = max(embeddings, key=len).shape
        for m in model.modules():
            if isinstance(m, nn.Linear) and m.weight.shape == largest:
                apart |= {id(p) for p in m.parameters()}
    return apart
