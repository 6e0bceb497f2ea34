"""llama2.c's version-0 `.bin` (karpathy/llama2.c, export.py::legacy_export, run.c::memory_map_weights).

    7 int32    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size (negative if the output layer is not tied),
               seq_len
    float32    tok_embeddings; then, each for all layers in turn: attention_norm, wq, wk, wv, wo, ffn_norm, w1, w2, w3;
               norm; cosines and sines of the rotary angles [seq_len, D / 2] each; output, unless tied

Rotary embedding on adjacent pairs with theta 10000, RMSNorm with eps 1e-5 (constants of run.c).
"""

import struct
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from headway.checkpoints.formats.meta import MetaModel
from headway.checkpoints.hf.config_keys import MOST
from headway.errors import CheckpointError
from headway.models import ModelSpec
from headway.patterns import Causal
from headway.positions import Rotary
from headway.storage.reading import naming, open_regular, refuse_impostor
from headway.storage.safetensors import Entry
from headway.storage.tensors import Tensors

HEADER = struct.Struct("<7i")
GENERATION = {"bos_token_id": 1, "eos_token_id": [1, 2]}  # run.c: "the BOS (=1) token delimits sequences"
THETA, EPS = 10000.0, 1e-5


def read(path: str | Path) -> MetaModel:
    """Returns the model of a version-0 file. Raises CheckpointError for a file that is truncated, too long or of
    another version, or whose stored rotary angles are not those of theta 10000 and its head size."""
    path = Path(path)
    with open_regular(path) as file:
        head, size = file.read(512), file.seek(0, 2)
    refuse_impostor(path, head, "a llama2.c file")
    if size < HEADER.size:
        raise CheckpointError(
            f"{path} is truncated: it has {size} bytes, fewer than the header of {HEADER.size}"
        )
    spec = _spec(path, HEADER.unpack_from(head))
    half = spec.head_dim // 2
    shapes = dict(_shapes(spec))
    angles = [("cos", (spec.trained_context, half)), ("sin", (spec.trained_context, half))]
    order = [*shapes.items(), *angles, *([] if spec.tied else [("output.weight", (spec.vocab, spec.width))])]
    expected = HEADER.size + 4 * sum(prod(shape) for _, shape in order)
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise CheckpointError(f"{path} is {state}: {size:,} bytes, but its header asks for {expected:,}")
    entries: dict[str, Entry] = {}
    offset = HEADER.size
    for name, shape in order:
        count = spec.layers if "#" in name else 1
        for i in range(count):
            entry = Entry(shape[1:] if "#" in name else shape, torch.float32, path, offset)
            entries[name.replace("#", str(i))] = entry
            offset += entry.nbytes
    tables = Tensors({name: entries.pop(name) for name in ("cos", "sin")})
    assert isinstance(spec.positions, Rotary)
    _check_angles(path, spec.positions, spec, tables["cos"], tables["sin"])
    return MetaModel(spec, Tensors(entries), path)


def looks_like(path: Path) -> bool:
    """Returns whether a file begins with a plausible header of version 0."""
    with open_regular(path) as file:
        head = file.read(HEADER.size)
    return len(head) == HEADER.size and _plausible(*HEADER.unpack(head))


def _plausible(
    dim: int, hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int
) -> bool:
    positive = min(dim, hidden, layers, heads, kv_heads, context) > 0 and vocab != 0
    return positive and dim % heads == 0 and heads % kv_heads == 0


def _spec(path: Path, header: tuple[int, ...]) -> ModelSpec:
    dim, hidden, layers, heads, kv_heads, vocab, context = header
    if dim == 0x616B3432:
        raise CheckpointError(
            f"{path} is a llama2.c file of version {hidden}; only version 0 (float32) is read"
        )
    if not _plausible(*header) or layers > MOST["layer"] or dim // heads > MOST["head_dim"]:
        raise CheckpointError(f"{path} is not a llama2.c file of version 0: its header is {header}")
    with naming(path):
        return ModelSpec(
            family="llama", vocab=abs(vocab), width=dim, layers=layers, heads=heads, kv_heads=kv_heads,
            head_dim=dim // heads, hidden=hidden, patterns=(Causal(),) * layers,
            positions=Rotary(THETA, pairing="adjacent"), norm_eps=EPS, tied=vocab > 0,
            trained_context=context,
        )  # fmt: skip


def _shapes(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    n, m, f = spec.layers, spec.width, spec.hidden
    kv = spec.kv_heads * spec.head_dim
    return [
        ("tok_embeddings.weight", (spec.vocab, m)),
        ("layers.#.attention_norm.weight", (n, m)),
        ("layers.#.attention.wq.weight", (n, m, m)),
        ("layers.#.attention.wk.weight", (n, kv, m)),
        ("layers.#.attention.wv.weight", (n, kv, m)),
        ("layers.#.attention.wo.weight", (n, m, m)),
        ("layers.#.ffn_norm.weight", (n, m)),
        ("layers.#.feed_forward.w1.weight", (n, f, m)),
        ("layers.#.feed_forward.w2.weight", (n, m, f)),
        ("layers.#.feed_forward.w3.weight", (n, f, m)),
        ("norm.weight", (m,)),
    ]


def _check_angles(path: Path, rotary: Rotary, spec: ModelSpec, cos: Tensor, sin: Tensor) -> None:
    angles = torch.outer(torch.arange(len(cos), dtype=torch.float64), rotary.frequencies(spec.head_dim))
    off = max(float((angles.cos() - cos).abs().max()), float((angles.sin() - sin).abs().max()))
    # the file's angles are float32 products p / theta^(2i/D) <= seq_len: each is off by at most 2^-23 of that
    if not off <= len(cos) * 2.0**-23:
        raise CheckpointError(
            f"{path}: the stored rotary angles differ by {off:.2g} from theta {THETA:g}; either the file is damaged "
            "or it was trained with another theta, which run.c would ignore"
        )
