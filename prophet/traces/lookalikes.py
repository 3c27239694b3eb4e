"""Files that people pass as routing traces and that no reader here takes: what each is, and what to do instead.

A file is recognised by its name and its first bytes alone. Nothing in it is decoded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# Bytes that are read of a file
_HEAD_BYTES = 4096
# A zip with data.pkl, as torch.save writes since release 1.6, or a bare pickle of protocol 2 to 5
_TORCH = rb"^PK\x03\x04.{26}[^\0]{0,200}?/data\.pkl|^\x80[\x02-\x05]"


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of file; `name` and `head` are regular expressions.

    Attributes:
        name: What the file's name holds.
        head: What its first bytes hold.
        looks_like: What the file is.
        instead: What to do.
    """

    name: str
    head: bytes
    looks_like: str
    instead: str


# The first kind that fits is named, so what is special stands above what is general.
_KINDS = (
    _Kind(
        r"^expert_distribution_recorder_.*\.pt$", b"",
        "what SGLang's expert distribution recorder dumps, a pickle",
        "in mode `stat` this writes its counts as JSON, which is read: python -c \"import json, sys, torch; "
        "d = torch.load(sys.argv[1], 'cpu', weights_only=True); json.dump({'logical_count': "
        "d['logical_count'].tolist()}, open(sys.argv[1] + '.json', 'w'))\" FILE",
    ),
    _Kind(
        r"^rank\d+_step\d+_experts?_counts\.pt$", b"",
        "what LMDeploy's expert distribution recorder dumps, a pickle",
        "this writes its counts as JSON, which is read: python -c \"import json, sys, torch; "
        "d = torch.load(sys.argv[1], 'cpu', weights_only=True); json.dump({'logical_count': "
        "d['counts'].tolist()}, open(sys.argv[1] + '.json', 'w'))\" FILE",
    ),
    _Kind(
        r"", _TORCH,
        "what torch.save or pickle writes",
        "pickles are never read; write counts [steps, layers, ranks, experts] with numpy.savez(FILE, counts=..., "
        "iteration=numpy.arange(steps))",
    ),
    _Kind(
        r"", rb"^\x93NUMPY",
        "one array as numpy.save writes it",
        "write numpy.savez(FILE, counts=array, iteration=numpy.arange(len(array))) with counts [steps, layers, "
        "ranks, experts]",
    ),
    _Kind(
        r"", rb"^GGUF[\s\S]*imatrix",
        "an importance matrix of llama.cpp",
        "its tensors `blk.N.ffn_up_exps.weight.counts` hold the tokens of layer N's experts over the whole text; "
        "write them as layer_id,expert_id,count (the package gguf reads them)",
    ),
    _Kind(
        r"imatrix.*\.dat$", b"",
        "an importance matrix of llama.cpp in its old format, which has no counts of experts",
        "make it again with --output-format gguf",
    ),
    _Kind(
        r"", rb'"(?:traceEvents|deviceProperties)"',
        "a profile of torch.profiler, such as DeepSeek's profile-data",
        "it holds times and no routing; record the router's counts instead",
    ),
    _Kind(
        r"", rb'"(?:window|latest)_expert_load"|"num_physical_experts".*"snapshots"',
        "what vLLM's balancer dumps into its expert_load_dump_dir",
        "its counts are those of physical experts, and the map beside them is of after the rebalancing, so they cannot "
        "be assigned to experts; write counts by logical expert as {\"logical_count\": ...}",
    ),
    _Kind(
        r"", rb'"(?:moe_layer_count|physical_to_logical_map|device_expert)"',
        "a map of which device holds which expert, as vLLM-Ascend, MindIE and SGLang write it",
        "it holds no counts; pass the counts that it was made from",
    ),
    _Kind(
        r"", rb"EPLB step: |\[Expert Balancedness\]|avg_balancedness=",
        "a log of vLLM, SGLang or LMDeploy with one figure of balance a step",
        "it has no counts by expert; turn on the recorder of expert counts",
    ),
    _Kind(
        r"\.tfevents\.", b"",
        "an event file of TensorBoard",
        "it holds figures of balance, not counts by layer, rank and expert; record the router's counts instead",
    ),
    _Kind(r"", rb"^version https://git-lfs", "a pointer of Git LFS, not the file", "fetch it with git lfs pull"),
    _Kind(r"", rb"^\s*<(?:!DOCTYPE|html)", "a page of a web site, not the file", "download the file itself"),
    _Kind(r"", rb"^PAR1", "a Parquet file", "write it as CSV: pandas.read_parquet(FILE).to_csv(...)"),
    _Kind(r"\.parquet$", b"", "a Parquet file", "write it as CSV: pandas.read_parquet(FILE).to_csv(...)"),
    _Kind(r"", rb"^PK\x03\x04.{26}(?:\[Content_Types\]|xl/|mimetype)", "a workbook", "save the sheet as CSV"),
    _Kind(r"", rb"^(?:\x1f\x8b|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ)", "a compressed file", "unpack it first"),
    _Kind(r"\.(?:zip|tar)$", b"", "an archive of files", "unpack it, and pass the folder"),
)  # fmt: skip


def looks_like(file: Path) -> str | None:
    """Describe what `file` looks like and what to do instead, as a clause; None for what is not known."""
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
    # The caller has a better message for a file that is missing
    except OSError:
        return None
    for kind in _KINDS:
        # DOTALL: the first bytes of a binary file hold line ends anywhere.
        if re.search(kind.name, file.name) and re.search(kind.head, head, re.DOTALL):
            return f"this looks like {kind.looks_like}: {kind.instead}"
    return None
