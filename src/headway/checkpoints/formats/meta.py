"""LLaMA under Meta's names: the table of names, a reference forward pass on them, and pickled checkpoints
(in one file or, by `shards`, in several).

Meta's files, llama2.c and torchtune mark positions on adjacent pairs (x[2i], x[2i+1]).
Legend: T tokens, M width, H query heads, K kv heads, D per head, V vocab.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from sys import float_info
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.formats.meta_shards import open_shards, shard_files
from headway.errors import CheckpointError, did_you_mean
from headway.models import ModelSpec
from headway.patterns import Causal
from headway.positions import Llama3, Rotary
from headway.storage.lazy import forms, renamed
from headway.storage.reading import naming, read_json

_NAMES = (
    ("model.embed_tokens.weight", "tok_embeddings.weight", "tok_embeddings.weight"),
    ("model.layers.#.input_layernorm.weight", "layers.#.attention_norm.weight", "layers.#.sa_norm.scale"),
    ("model.layers.#.self_attn.q_proj.weight", "layers.#.attention.wq.weight", "layers.#.attn.q_proj.weight"),
    ("model.layers.#.self_attn.k_proj.weight", "layers.#.attention.wk.weight", "layers.#.attn.k_proj.weight"),
    ("model.layers.#.self_attn.v_proj.weight", "layers.#.attention.wv.weight", "layers.#.attn.v_proj.weight"),
    (
        "model.layers.#.self_attn.o_proj.weight",
        "layers.#.attention.wo.weight",
        "layers.#.attn.output_proj.weight",
    ),
    ("model.layers.#.post_attention_layernorm.weight", "layers.#.ffn_norm.weight", "layers.#.mlp_norm.scale"),
    ("model.layers.#.mlp.gate_proj.weight", "layers.#.feed_forward.w1.weight", "layers.#.mlp.w1.weight"),
    ("model.layers.#.mlp.up_proj.weight", "layers.#.feed_forward.w3.weight", "layers.#.mlp.w3.weight"),
    ("model.layers.#.mlp.down_proj.weight", "layers.#.feed_forward.w2.weight", "layers.#.mlp.w2.weight"),
    ("model.norm.weight", "norm.weight", "norm.scale"),
    ("lm_head.weight", "output.weight", "output.weight"),
)
"""Ours, Meta's, torchtune's; "#" is the number of a layer."""
META: Mapping[str, str] = {ours: theirs for ours, theirs, _ in _NAMES}
"""Ours -> Meta's."""
TORCHTUNE: Mapping[str, str] = {tune: theirs for _, theirs, tune in _NAMES}
"""torchtune's -> Meta's."""
_DERIVED = ("rope.freqs",)
_NUMBER = int | float
_PARAMS: Mapping[str, Any] = {
    **dict.fromkeys(("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of"), int),
    **dict.fromkeys(("max_seq_len", "max_batch_size"), int),
    **dict.fromkeys(("norm_eps", "rope_theta", "ffn_dim_multiplier"), _NUMBER),
    **dict.fromkeys(("rope_scaling_factor", "rope_high_freq_factor"), _NUMBER),
    "use_scaled_rope": bool,
}
"""The keys of params.json; sizes are checked against the tensors."""
_WANTED = {bool: "true or false", int: "a positive whole number", _NUMBER: "a number above 0"}


@dataclass(frozen=True)
class MetaModel:
    """A LLaMA with its weights under Meta's names."""

    spec: ModelSpec
    weights: Mapping[str, Tensor]

    def state(self) -> Mapping[str, Tensor]:
        """The weights under the names of `Decoder`, still in adjacent pairing; lazy where `weights` are."""
        return translate(self.weights, {theirs: ours for ours, theirs in META.items()}, "this file")

    def logits(self, ids: Tensor) -> Tensor:
        """Reference logits [T, V] of one row of ids [T], in the dtype of the weights: Meta's forward pass,
        plainly.

        Independent of `Decoder` and of the table of names, so that equality with it shows the conversion.
        """
        w, spec = self.weights, self.spec
        assert isinstance(spec.positions, Rotary)
        x = w["tok_embeddings.weight"][ids]
        hidden, n = x.dtype, len(ids)
        angles = torch.outer(torch.arange(n, dtype=torch.float64), spec.positions.frequencies(spec.head_dim))
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        future = torch.full((n, n), float("-inf"), dtype=hidden).triu(1)

        def norm(y: Tensor, gain: Tensor) -> Tensor:
            y32 = y.to(torch.promote_types(y.dtype, torch.float32))
            return (y32 * torch.rsqrt(y32.square().mean(-1, keepdim=True) + spec.norm_eps)).to(hidden) * gain

        def rotate(y: Tensor) -> Tensor:
            pairs = torch.view_as_complex(y.double().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * turn).flatten(-2).to(hidden)

        for i in range(spec.layers):
            here = f"layers.{i}."
            layer = {name.removeprefix(here): w[name] for name in w if name.startswith(here)}
            y = norm(x, layer["attention_norm.weight"])
            q = rotate((y @ layer["attention.wq.weight"].T).unflatten(-1, (spec.heads, -1)))
            k = rotate((y @ layer["attention.wk.weight"].T).unflatten(-1, (spec.kv_heads, -1)))
            v = (y @ layer["attention.wv.weight"].T).unflatten(-1, (spec.kv_heads, -1))
            k, v = (z.repeat_interleave(spec.heads // spec.kv_heads, 1) for z in (k, v))
            scores = torch.einsum("thd,shd->hts", q, k) * spec.head_dim**-0.5 + future
            seen = torch.einsum("hts,shd->thd", scores.float().softmax(-1).to(hidden), v)
            x = x + seen.flatten(1) @ layer["attention.wo.weight"].T
            y = norm(x, layer["ffn_norm.weight"])
            gate = torch.nn.functional.silu(y @ layer["feed_forward.w1.weight"].T)
            x = x + (gate * (y @ layer["feed_forward.w3.weight"].T)) @ layer["feed_forward.w2.weight"].T
        last = "tok_embeddings.weight" if spec.tied else "output.weight"
        return norm(x, w["norm.weight"]) @ w[last].T


def translate(tensors: Mapping[str, Tensor], names: Mapping[str, str], source: str) -> Mapping[str, Tensor]:
    """The same tensors under other names. Raises CheckpointError for a name that the table does not know."""
    new: dict[str, str] = {}
    for name in tensors:
        if name in _DERIVED:
            continue
        number = re.search(r"layers\.(\d{1,6})\.", name)
        general = name.replace(f"layers.{number[1]}.", "layers.#.", 1) if number else name
        if general not in names:
            raise CheckpointError(
                f"{source}: there is no place for {name or 'a tensor without a name'}{did_you_mean(general, names)}"
            )
        new[names[general].replace("#", number[1] if number else "")] = name
    return renamed(tensors, new)


def read_pickled(
    path: str | Path,
    *,
    layout: str,
    allow_pickle: bool,
    heads: int | None = None,
    norm_eps: float | None = None,
) -> MetaModel:
    """A LLaMA of Meta (`layout` "meta") or torchtune: one pickled file, or a folder of Meta's with
    consolidated.00.pth, consolidated.01.pth, ...; with Meta's params.json in the same folder, if any.

    Sizes are read off the tensors; the head count cannot be: it comes from params.json or from `heads`.
    `norm_eps` is params.json's or 1e-5 (LLaMA 2's) unless given. A file that is one of several parts means
    all of them. Raises CheckpointError for what is missing or contradicts itself.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    files = shard_files(folder) if path.is_dir() or path.name.startswith("consolidated.") else [path]
    if not files:
        raise CheckpointError(f"{folder} holds no consolidated.00.pth")
    params = _params(folder / "params.json")
    stated = params.get("n_heads")
    if heads is not None and stated is not None and heads != stated:
        raise CheckpointError(f"{path}: {heads} heads were asked for, but params.json has {stated}")
    heads = heads if heads is not None else stated
    stored = open_shards(files, heads=heads, kv_heads=params.get("n_kv_heads"), allow_pickle=allow_pickle)
    names = TORCHTUNE if layout == "torchtune" else {theirs: theirs for theirs in META.values()}
    where = files[0] if len(files) == 1 else folder / "consolidated.*.pth"
    weights = translate(stored, names, str(where))
    return MetaModel(_spec(weights, params, where, heads, norm_eps), weights)


def _params(path: Path) -> dict[str, Any]:
    """The values of params.json, validated; {} where there is none."""
    params = read_json(path) if path.exists() else {}
    for key, value in params.items():
        if key not in _PARAMS:
            raise CheckpointError(f"{path}: unknown key {key[:80]!r}{did_you_mean(key, _PARAMS)}")
        kind = _PARAMS[key]
        number = isinstance(value, kind) and (kind is bool) == isinstance(value, bool)
        unknown = value is None or (key == "vocab_size" and value == -1)
        if not unknown and not (number and (kind is bool or 0 < value <= float_info.max)):
            raise CheckpointError(f"{path}: {key} must be {_WANTED[kind]}, got {str(value)[:80]}")
    return {key: value for key, value in params.items() if value is not None}


def _spec(
    w: Mapping[str, Tensor], params: Mapping[str, Any], path: Path, heads: int | None, norm_eps: float | None
) -> ModelSpec:
    if heads is None:
        raise CheckpointError(
            f"{path}: the number of heads is not in the tensors: put params.json into its folder, or use --heads"
        )
    shapes = {name: form.shape for name, form in forms(w).items()}
    layers = max((int(name.split(".")[1]) for name in shapes if name.startswith("layers.")), default=-1) + 1
    if layers > len(shapes):
        raise CheckpointError(f"{path}: there is a layer {layers - 1}, but only {len(shapes)} tensors")
    needed = [META[name].replace("#", str(i)) for name in META for i in range(layers if "#" in name else 1)]
    missing = [name for name in needed if name not in shapes and name != "output.weight"]
    if missing or not layers:
        raise CheckpointError(f"{path}: missing {', '.join(missing[:5]) or 'all layers'}")
    if odd := [n for n, shape in shapes.items() if len(shape) != (1 if n.endswith("norm.weight") else 2)]:
        axes = "[width]" if odd[0].endswith("norm.weight") else "[rows, columns]"
        raise CheckpointError(f"{path}: {odd[0]} has the shape {list(shapes[odd[0]])}, expected is {axes}")
    vocab, width = shapes["tok_embeddings.weight"]
    for field, size in (("dim", width), ("n_layers", layers), ("vocab_size", vocab)):
        if params.get(field) not in (None, -1, size):
            raise CheckpointError(
                f"{path}: params.json has {field} {params[field]}, but the tensors have {size}"
            )
    query, key = (shapes[f"layers.0.attention.{n}.weight"][0] for n in ("wq", "wk"))
    if query % heads or key % max(query // heads, 1) or not query or not key:
        raise CheckpointError(
            f"{path}: {heads} heads do not fit queries of {query} and keys of {key} rows: n_heads of params.json, or "
            "--heads, is another model's"
        )
    head_dim = query // heads
    if params.get("n_kv_heads", key // head_dim) * head_dim != key:
        raise CheckpointError(
            f"{path}: params.json has n_kv_heads {params['n_kv_heads']}, but the tensors have {key // head_dim}"
        )
    theta, context = float(params.get("rope_theta", 10000.0)), int(params.get("max_seq_len", 2048))
    scaling = None
    if params.get("use_scaled_rope"):
        factor = float(params.get("rope_scaling_factor", 8.0))
        scaling = Llama3(factor, 1.0, float(params.get("rope_high_freq_factor", 4.0)), 8192)
        context = 131072
    parameters = path.with_name("params.json")
    with naming(parameters if params else path):
        return ModelSpec(
            family="llama", vocab=vocab, width=width, layers=layers, heads=heads, kv_heads=key // head_dim,
            head_dim=head_dim, hidden=shapes["layers.0.feed_forward.w1.weight"][0], patterns=(Causal(),) * layers,
            positions=Rotary(theta, pairing="adjacent", scaling=scaling),
            norm_eps=norm_eps if norm_eps is not None else float(params.get("norm_eps", 1e-5)),
            tied="output.weight" not in w, trained_context=context,
        )  # fmt: skip
