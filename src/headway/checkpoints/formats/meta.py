"""LLaMA under Meta's tensor names: the table of names, a reference forward pass on them, and pickled checkpoints.

Meta's files and llama2.c apply rotary embedding to adjacent pairs (x[2i], x[2i+1]).
Legend: T tokens, M width, H query heads, K kv heads, D per head, V vocab.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headway.checkpoints.formats.meta_shards import open_shards, shard_files
from headway.checkpoints.hf.config_keys import ConfigReader, check_keys, checked_sizes, reading
from headway.checkpoints.hf.harmless import words
from headway.checkpoints.hf.layouts.rules import decoder_names
from headway.checkpoints.hf.layouts.tensors import imported
from headway.errors import CheckpointError
from headway.models import ModelSpec
from headway.patterns import Causal
from headway.positions import Llama3, Rotary
from headway.storage.lazy import LazyTensors
from headway.storage.reading import read_json
from headway.storage.tensors import Tensors

NAMES = decoder_names(
    *("", "tok_embeddings", "norm", "layers.#."),
    {
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    },
    head="output",
    unused=("rope.freqs",),  # a function of the sizes
)
"""The names of our tensors and of theirs."""
PARAMS = "params.json"
KNOWN = words(
    "dim n_layers n_heads n_kv_heads vocab_size multiple_of max_seq_len max_batch_size norm_eps rope_theta "
    "ffn_dim_multiplier use_scaled_rope rope_scaling_factor rope_high_freq_factor"
)
"""The supported keys of params.json; sizes are checked against the tensors."""


@dataclass(frozen=True)
class MetaModel:
    """A LLaMA model with the weights of a file, under Meta's names."""

    spec: ModelSpec
    weights: Tensors
    path: Path

    def state(self) -> LazyTensors:
        """Returns the weights under the names of `Decoder`, still in adjacent pairing. Raises CheckpointError for
        weights that are missing, unexpected or of another shape, listed together."""
        return imported(NAMES, self.weights, self.spec, self.path, described_by="its sizes")[0]

    def logits(self, w: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        """Returns reference logits [T, V] of one sequence of ids [T], with the weights `w` in their dtype, by a plain
        implementation of Meta's forward pass.

        It is independent of `Decoder` and of the table of names, so that equal logits verify the conversion.
        """
        spec = self.spec
        assert isinstance(spec.positions, Rotary)
        x = w["tok_embeddings.weight"][ids]
        hidden, n = x.dtype, len(ids)
        wide = torch.promote_types(hidden, torch.float32)
        angles = torch.outer(torch.arange(n, dtype=torch.float64), spec.positions.frequencies(spec.head_dim))
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        future = torch.full((n, n), float("-inf"), dtype=hidden).triu(1)

        def norm(y: Tensor, gain: Tensor) -> Tensor:
            y = y.to(wide)
            return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + spec.norm_eps)).to(hidden) * gain

        def rotate(y: Tensor) -> Tensor:
            pairs = torch.view_as_complex(y.double().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * turn).flatten(-2).to(hidden)

        for i in range(spec.layers):
            prefix = f"layers.{i}."
            layer = {name.removeprefix(prefix): w[name] for name in w if name.startswith(prefix)}
            y = norm(x, layer["attention_norm.weight"])
            q = rotate((y @ layer["attention.wq.weight"].T).unflatten(-1, (spec.heads, -1)))
            k = rotate((y @ layer["attention.wk.weight"].T).unflatten(-1, (spec.kv_heads, -1)))
            v = (y @ layer["attention.wv.weight"].T).unflatten(-1, (spec.kv_heads, -1))
            k, v = (z.repeat_interleave(spec.heads // spec.kv_heads, 1) for z in (k, v))
            scores = torch.einsum("thd,shd->hts", q, k) * spec.head_dim**-0.5 + future
            attended = torch.einsum("hts,shd->thd", scores.to(wide).softmax(-1).to(hidden), v)
            x = x + attended.flatten(1) @ layer["attention.wo.weight"].T
            y = norm(x, layer["ffn_norm.weight"])
            gate = torch.nn.functional.silu(y @ layer["feed_forward.w1.weight"].T)
            x = x + (gate * (y @ layer["feed_forward.w3.weight"].T)) @ layer["feed_forward.w2.weight"].T
        last = "tok_embeddings.weight" if spec.tied else "output.weight"
        return norm(x, w["norm.weight"]) @ w[last].T


def read_pickled(path: str | Path, *, allow_pickle: bool) -> MetaModel:
    """Returns Meta's LLaMA from a pickled file, or from the folder of consolidated.00.pth, consolidated.01.pth, ...,
    with Meta's params.json in the same folder. A file that is one of several parts stands for all of them.

    Sizes are read from the tensors, except the number of heads. Raises CheckpointError for what is missing or
    inconsistent."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    files = shard_files(folder) if path.is_dir() or path.name.startswith("consolidated.") else [path]
    if not files:
        raise CheckpointError(f"{folder} has no consolidated.00.pth")
    where = files[0] if len(files) == 1 else folder / "consolidated.*.pth"
    stated = folder / PARAMS
    content = read_json(stated) if stated.exists() else {}
    with reading(stated):
        check_keys(content, dict.fromkeys(KNOWN))
        params = ConfigReader(content, {})
        heads, kv_heads = (
            None if params.get(name) is None else params.whole(name) for name in ("n_heads", "n_kv_heads")
        )
        weights = open_shards(files, heads=heads, kv_heads=kv_heads, allow_pickle=allow_pickle)
        return MetaModel(_spec(weights, params, where), weights, where)


def _spec(w: LazyTensors, params: ConfigReader, path: Path) -> ModelSpec:
    if params.get("n_heads") is None:
        raise CheckpointError(
            f'{path}: the tensors do not give the number of heads; put a params.json with "n_heads" beside them'
        )

    def shape(name: str) -> tuple[int, int]:
        form = w.forms.get(f"{name}.weight")
        if form is None or len(form.shape) != 2 or 0 in form.shape:
            problem = (
                "is missing" if form is None else f"must have shape [rows, columns], got {list(form.shape)}"
            )
            raise CheckpointError(f"{path}: {name}.weight {problem}: not a LLaMA checkpoint in Meta's format")
        return form.shape[0], form.shape[1]

    numbers = [
        int(n) for name in w.forms if name.startswith("layers.") and (n := name.split(".")[1]).isdecimal()
    ]
    layers = max(numbers, default=-1) + 1
    vocab, width = shape("tok_embeddings")
    for field, size in (("dim", width), ("n_layers", layers), ("vocab_size", vocab)):
        if params.get(field) not in (None, -1, size):
            raise CheckpointError(
                f"{path}: params.json has {field} {params.get(field)}, but the tensors have {size}"
            )
    heads = params.whole("n_heads")
    query, key = (shape(f"layers.0.attention.{n}")[0] for n in ("wq", "wk"))
    if query % heads or key % max(query // heads, 1):
        raise CheckpointError(
            f"{path}: n_heads {heads} of params.json does not fit wq of {query} and wk of {key} rows: params.json is "
            "another model's"
        )
    head_dim = query // heads
    if params.whole("n_kv_heads", key // head_dim) * head_dim != key:
        raise CheckpointError(
            f"{path}: params.json has n_kv_heads {params.get('n_kv_heads')}, but the tensors have {key // head_dim}"
        )
    context, scaling = params.whole("max_seq_len", 2048), None
    if params.flag("use_scaled_rope"):
        factors = params.number("rope_scaling_factor", 8.0), 1.0, params.number("rope_high_freq_factor", 4.0)
        context, scaling = 131072, Llama3(*factors, 8192)
    sizes = checked_sizes({"layers": layers, "kv_heads": key // head_dim, "head_dim": head_dim})
    return ModelSpec(
        family="llama",
        vocab=vocab,
        width=width,
        heads=heads,
        hidden=shape("layers.0.feed_forward.w1")[0],
        **sizes,
        patterns=(Causal(),) * layers,
        positions=Rotary(params.number("rope_theta", 10000.0), pairing="adjacent", scaling=scaling),
        norm_eps=params.number("norm_eps", 1e-5),
        tied="output.weight" not in w,
        trained_context=context,
    )
