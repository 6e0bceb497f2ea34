"""Tensor parallelism: each rank holds every block with its share of heads and hidden units.

shards = shard(model, TensorParallel(exchange))          in place, on every rank
losses = model(ids, targets=targets)                     the same on all ranks
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.heads import Heads
from headway.models.build import Model
from headway.models.mixers import differ, kind_of, parts_of
from headway.models.spec import ModelSpec
from headway.models.stack import TransformerStack
from headway.nn import (
    AttentionLayer,
    Linear,
    RMSNorm,
    Scores,
    Share,
    TokenEmbedding,
    adapted,
    linears,
)
from headway.nn.feedforward import XIELU
from headway.nn.linear_attention import LinearMixer
from headway.nn.mixers import Mixer, SoftmaxMixer
from headway.nn.share import part_of
from headway.parallel import Shards, TensorParallel
from headway.parallel.tensor import share
from headway.patterns import Pattern, PerHead
from headway.positions import LinearBias
from headway.scores import Score

AXES: dict[str, int] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("q_global_proj", "k_global_proj", "v_global_proj"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}
"""The axis along which the weight of each linear layer of a block is sharded: 0 outputs, 1 inputs."""


def shard(model: Model, tensor: TensorParallel) -> Shards:
    """Keeps only this rank's share of every layer of `model`, in place; `model.shards` records the sharding.

    Query heads, kv heads and hidden units are divided evenly, in order; a norm over all heads is computed over all
    ranks; patterns, scores and per-head tables are those of the rank's heads. The rows of embeddings and of an output
    layer over the vocab are sharded too, if the number of ranks divides them (`shares_vocab`): logits are gathered
    when they are requested, and a loss never gathers all of them. Everything else is replicated, with the same
    gradient on all ranks, except for what the heads of a layer share (`Shards.summed`).

    Adapters are sharded like their layer: with row sharding B and m are, with column sharding A; gradients of the
    replicated part must be summed (`Shards.summed`). Quantized weights are exactly a part of the whole quantized
    matrix. Dropout of hidden units is drawn for all of them, and each rank uses its part.

    Raises ConfigError if the number of ranks does not divide kv heads or hidden units, for layers without attention,
    for quantized weights whose blocks would be split, and for merged adapters.
    """
    if model.shards is not None:
        raise ConfigError("tensor parallel: this model is already sharded; build a new one")
    share_of(model.spec, tensor.exchange.ranks, 0)
    layers = [m for m in model.modules() if isinstance(m, AttentionLayer)]
    stacks = [m for m in model.modules() if isinstance(m, TransformerStack)]
    for name, linear in linears(model).items():
        _check(name, linear, tensor)
    whole = _shapes(model)
    for layer in layers:
        heads = tensor.share(layer.heads.query_heads, "heads")
        layer.heads = Heads(layer.heads.kv_heads // tensor.exchange.ranks, layer.heads.group)
        layer.mixer, layer.score = _own_mixer(layer.mixer, heads), _own_scores(layer.score, heads)
        if layer.sink_logit is not None:
            layer.sink_logit = part_of(layer.sink_logit, 0, heads)
    for stack in stacks:
        stack.scores = _own_scores(stack.scores, tensor.share(stack.spec.heads, "heads"))
    for layer in layers:
        for norm in (layer.q_norm, layer.k_norm):
            if isinstance(norm, RMSNorm) and norm.width > layer.head_dim:  # a norm over all heads
                norm.divide(Share(tensor, 0))
    for name, linear in linears(model).items():
        if (axis := AXES.get(_last(name))) is not None:
            linear.divide(Share(tensor, axis))
    _share_vocab(model, tensor)
    low_ranks = [part for _, layer in adapted(model) for part in layer.adapters.values()]
    parts = _shapes(model)
    axes = {
        name: next(axis for axis, size in enumerate(shape) if size != parts[name][axis])
        for name, shape in whole.items()
        if shape != parts[name]
    }
    acts = [m for m in model.modules() if isinstance(m, XIELU)]
    among_heads = {id(p) for m in (*layers, *acts, *low_ranks) for p in m.parameters()}
    among_heads |= {id(p) for stack in stacks for p in stack.scores.parameters()}
    after = {id(m.bias) for m in linears(model).values() if m.share is not None and m.share.axis}
    summed = {name for name, p in model.named_parameters() if id(p) in among_heads - after}
    model.shards = Shards(tensor, axes, frozenset(summed - axes.keys()))
    return model.shards


def shares_vocab(vocab: int, ranks: int) -> bool:
    """Returns whether the rows of an embedding, and of the output layer, are sharded: if the number of ranks
    divides the vocab. Other vocabs are replicated."""
    return vocab % ranks == 0


def share_of(spec: ModelSpec, ranks: int, rank: int) -> ModelSpec:
    """Returns the spec of a rank's part: all layers with its heads and hidden units, and its part of the vocab.
    Raises ConfigError if the number of ranks does not divide kv heads or hidden units, and for layers without
    attention."""
    parts = [kind_of(part) for mixer in spec.mixers for part in parts_of(mixer)]
    names = [kind.name for kind in parts if not kind.positions]
    if names and ranks > 1:
        raise ConfigError(f"tensor parallel does not support {names[0]} yet")
    if differ(spec.mixers) and ranks > 1:
        raise ConfigError("tensor parallel does not support heads that differ between layers yet")
    if ranks > 1 and (spec.altup is not None or spec.laurel or any(spec.mlp_sparsity)):
        raise ConfigError("tensor parallel does not support altup, laurel and mlp_sparsity yet")
    heads = share(spec.heads, "heads", ranks, rank)

    def units(hidden: int) -> int:
        return len(share(hidden, "hidden units", ranks, rank))

    positions = spec.positions
    if isinstance(positions, LinearBias) and positions.slopes is not None:
        positions = LinearBias(positions.slopes[heads.start : heads.stop])
    return replace(
        spec,
        vocab=spec.vocab // ranks if shares_vocab(spec.vocab, ranks) else spec.vocab,
        heads=len(heads),
        kv_heads=len(share(spec.kv_heads, "kv heads", ranks, rank)),
        hidden=units(spec.hidden),
        layer_hidden=tuple(size and units(size) for size in spec.layer_hidden),
        experts=tuple(e and replace(e, hidden=units(e.hidden), shared=units(e.shared)) for e in spec.experts),
        patterns=tuple(_own_pattern(pattern, heads) for pattern in spec.patterns),
        positions=positions,
        encoder=None if spec.encoder is None else share_of(spec.encoder, ranks, rank),
    )


def shards_of(model: nn.Module) -> Shards | None:
    """Returns how ranks share the layers of a model; None if they do not."""
    return getattr(model, "shards", None)


def _check(name: str, layer: Linear, tensor: TensorParallel) -> None:
    """Raises ConfigError if a layer's adapters are merged, or its weights cannot be split along the axis."""
    if (axis := AXES.get(_last(name))) is None:
        return
    if layer.merged:
        raise ConfigError(f"tensor parallel: {name} has merged adapters; call unmerge(model) first")
    rows = Share(tensor, axis).part(layer.in_features if axis else layer.out_features)
    if reason := layer.kept.part_reason(axis, rows):
        raise ConfigError(f"tensor parallel: {name} {reason}")


def _share_vocab(model: Model, tensor: TensorParallel) -> None:
    """Shards the rows of embeddings and of the output layer whose vocab the number of ranks divides."""
    tables = [m for m in model.modules() if isinstance(m, TokenEmbedding)]
    for layer in linears(model).values():
        if layer.is_output and shares_vocab(layer.out_features, tensor.exchange.ranks):
            layer.divide(Share(tensor, 0, joined=True))
    for table in tables:
        if shares_vocab(table.num_embeddings, tensor.exchange.ranks):
            table.divide(Share(tensor, 0))


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in model.state_dict().items()}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _own_mixer(mixer: Mixer, heads: range) -> Mixer:
    assert isinstance(mixer, SoftmaxMixer | LinearMixer)
    pattern = _own_pattern(mixer.pattern, heads)
    if isinstance(mixer, LinearMixer):
        return replace(mixer, pattern=pattern)
    return replace(mixer, pattern=pattern, first_head=heads.start)


def _own_pattern(pattern: Pattern, heads: range) -> Pattern:
    return PerHead(*pattern.heads[heads.start : heads.stop]) if isinstance(pattern, PerHead) else pattern


def _own_scores(scores: Scores, heads: range) -> Scores:
    at = torch.arange(heads.start, heads.stop)
    return Scores([_own_step(step, at) for step in scores()])


def _own_step(step: Score, heads: Tensor) -> Score:
    """Returns a score step for some heads; its trained tensors become new parameters of these heads."""
    local = step.select_heads(heads)
    fresh = [
        nn.Parameter(new.detach().clone(), requires_grad=old.requires_grad)
        if isinstance(old, nn.Parameter) and new is not old
        else new
        for old, new in zip(step.parameters, local.parameters, strict=True)
    ]
    return local.with_parameters(tuple(fresh))
