"""Checkpoints by torch's DCP on a storage host: every byte that is written or read passes the host's own link.

The storage keeps what is written in memory and sends of every saved box no more than was asked for, so it is the best
storage there can be. Each host has one connection to it.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from prophet.state.layout import Piece
from prophet.state.space import Space
from prophet.state.streams import torch_dtype

PORT = 29611
START_S = 30.0
METADATA = "metadata"


class _Handler(socketserver.StreamRequestHandler):
    """One host's connection: lines of JSON, each with the bytes it announces behind it."""

    rbufsize = 1 << 20
    disable_nagle_algorithm = True
    server: Storage

    def handle(self) -> None:
        self.connection.settimeout(self.server.limit_s)
        while line := self.rfile.readline():
            said = json.loads(line)
            if said["op"] == "put":
                memory = bytearray(said["bytes"])
                if self.rfile.readinto(memory) != len(memory):
                    return
                kept = torch.frombuffer(memory, dtype=getattr(torch, said["dtype"])).reshape(said["shape"])
                self.server.kept[said["key"]] = kept
            elif said["op"] == "written":
                self.wfile.write(b".")
            elif said["op"] == "get":
                for key, offsets, lengths in said["items"]:
                    self.wfile.write(_bytes_of(_cut(self.server.kept[key], offsets, lengths)))
            elif said["op"] == "size":
                self.wfile.write(f"{self.server.kept[said['key']].numel()}\n".encode())
            elif said["op"] == "clear":
                self.server.kept.clear()
            elif said["op"] == "stop":
                self.server.ended.set()


class Storage(socketserver.ThreadingTCPServer):
    """Serves until it is told to stop, or `limit_s` have passed."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: str, port: int, limit_s: float) -> None:
        super().__init__((address, port), _Handler)
        self.limit_s = limit_s
        self.kept: dict[str, Tensor] = {}
        self.ended = threading.Event()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def __exit__(self, *error: Any) -> None:
        self.shutdown()
        super().__exit__(*error)

    def wait(self) -> None:
        """Until the end; TimeoutError where nobody ends it in time."""
        with self:
            ended = self.ended.wait(self.limit_s)
        if not ended:
            raise TimeoutError(f"nobody has stopped the storage within {self.limit_s:g} s")


def _cut(tensor: Tensor, offsets: list[int], lengths: list[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class Client:
    """This host's connection to the storage; counts the bytes of tensors."""

    def __init__(self, address: str, port: int, timeout_s: float) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._socket = socket.create_connection((address, port), timeout=timeout_s)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self._file = self._socket.makefile("rb", buffering=1 << 20)
        self.written_bytes = self.read_bytes = 0

    def _say(self, **words: Any) -> None:
        self._socket.sendall(json.dumps(words).encode() + b"\n")

    def put(self, key: str, tensor: Tensor) -> None:
        """Write a tensor."""
        n_bytes = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._say(op="put", key=key, bytes=n_bytes, dtype=dtype, shape=list(tensor.shape))
        self._socket.sendall(_bytes_of(tensor))
        self.written_bytes += n_bytes

    def written(self) -> None:
        """Return once all that was written has come."""
        self._say(op="written")
        if self._file.read(1) != b".":
            raise RuntimeError("the storage has gone")

    def get(self, wanted: list[tuple[str, list[int], list[int]]], targets: list[Tensor]) -> None:
        """Read parts of saved tensors into `targets`: key, offsets and lengths of each. All are asked for at once."""
        self._say(op="get", items=wanted)
        for target in targets:
            n_bytes = target.numel() * target.element_size()
            memory = bytearray(n_bytes)
            if self._file.readinto(memory) != n_bytes:  # type: ignore[attr-defined]
                raise RuntimeError("the storage has gone")
            target.copy_(torch.frombuffer(memory, dtype=target.dtype).reshape(target.shape))
            self.read_bytes += n_bytes

    def size(self, key: str) -> int:
        """Elements of a saved tensor."""
        self._say(op="size", key=key)
        return int(self._file.readline())

    def clear(self) -> None:
        """Forget everything that was saved."""
        self._say(op="clear")

    def stop(self) -> None:
        """End the storage."""
        self._say(op="stop")

    def close(self) -> None:
        self._file.close()
        self._socket.close()


# --- DCP's side ---


class Boxes:
    """What this rank holds of one tensor, for DCP: boxes by their offsets."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype
        self.parts: dict[tuple[int, ...], Tensor] = {}

    def size(self) -> torch.Size:
        return self.shape

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(o), sizes=t.shape) for o, t in self.parts.items()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks()

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.chunks()
        ]


def state_dict_of(space: Space, state: Mapping[Piece, Tensor]) -> dict[str, Boxes]:
    """A rank's pieces as DCP takes them."""
    found: dict[str, Boxes] = {}
    for piece, tensor in state.items():
        spec = space[piece.name]
        boxes = found.setdefault(piece.name, Boxes(spec.shape, torch_dtype(spec)))
        boxes.parts[piece.box.start] = tensor
    return found


class BoxSavePlanner(DefaultSavePlanner):
    """DCP's own planner (each box is written by one of its holders, evenly), which finds tensors in `Boxes`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].parts[tuple(index.offset or ())]


class BoxLoadPlanner(DefaultLoadPlanner):
    """The same for reading."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.original_state_dict = self.state_dict = state_dict  # as it is: torch's own copies what it does not know
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found: Tensor = self.state_dict[index.fqn].parts[tuple(index.offset or ())]
        return found


def _key(index: MetadataIndex) -> str:
    return f"{index.fqn}{list(index.offset or ())}"


def json_of(metadata: Metadata) -> bytes:
    """What was saved, as JSON: reading it runs no code. An item's key follows from its name and offsets."""
    tensors = {}
    for name, of in metadata.state_dict_metadata.items():
        assert isinstance(of, TensorStorageMetadata)
        chunks = [[list(c.offsets), list(c.sizes)] for c in of.chunks]
        dtype = str(of.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(of.size), "chunks": chunks}
    return json.dumps(tensors).encode()


def metadata_of(words: bytes) -> Metadata:
    """The same for DCP."""
    found: dict[str, Any] = {}
    for name, of in json.loads(words).items():
        chunks = [ChunkStorageMetadata(offsets=torch.Size(o), sizes=torch.Size(n)) for o, n in of["chunks"]]
        properties = TensorProperties(dtype=getattr(torch, of["dtype"]))
        found[name] = TensorStorageMetadata(properties=properties, size=torch.Size(of["shape"]), chunks=chunks)
    return Metadata(state_dict_metadata=found)


class SocketWriter(StorageWriter):
    """Writes every item as its bytes to the storage host."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between checkpoints."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            self.client.put(_key(item.index), tensor)
            n_bytes = tensor.numel() * tensor.element_size()
            results.append(WriteResult(index=item.index, size_in_bytes=n_bytes, storage_data=None))
        self.client.written()
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.client.put(METADATA, torch.frombuffer(bytearray(json_of(metadata)), dtype=torch.uint8))
        self.client.written()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class SocketReader(StorageReader):
    """Reads what a rank wants, and no more, from the storage host."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between checkpoints."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        words = torch.empty(self.client.size(METADATA), dtype=torch.uint8)
        self.client.get([(METADATA, [0], [words.numel()])], [words])
        return metadata_of(words.numpy().tobytes())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted, targets = [], []
        for item in plan.items:
            wanted.append((_key(item.storage_index), list(item.storage_offsets), list(item.lengths)))
            targets.append(planner.resolve_tensor(item))
        self.client.get(wanted, targets)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
