"""Token mixers other than softmax attention in GGUF: their keys, and the names of their tensors.

A decay rate is stored as -e^rate (`model.py`). In Qwen3.5's delta layers, the value heads are ordered as the first of
every key head, then the second of every key head, and so on.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from headway.attention.delta import DeltaSpec, RuleSizes, SSDSpec
from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible
from headway.checkpoints.hf.layouts.hybrids import MIXER, by_mixer, gated_rules
from headway.checkpoints.hf.layouts.rules import Change, Rule, TensorNames, lifted
from headway.models import ModelSpec
from headway.models.mixers import Softmax
from headway.nn import ShortConv

KV_HEADS, RECURRENT, INTERVAL = (
    "attention.head_count_kv",
    "attention.recurrent_layers",
    "full_attention_interval",
)
LENGTH, NORM = "shortconv.l_cache", "blk.0.ssm_norm.weight"
SSM = tuple(
    f"ssm.{name}" for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
)


class Mixing(NamedTuple):
    """The token mixer that an architecture has besides softmax attention.

    Attributes:
        kind: the type of that mixer.
        keys: the metadata keys that it is read from.
        read: from the keys to the mixer.
        write: from the mixer to the keys.
        rules: returns the rules of the mixer's tensors, whose names are ours below `MIXER`.
        marks: which layers have it: those without kv heads ("heads"), those that a list marks or all except every n-th
            ("layers"), "all", or all of them in parallel with attention ("beside").
    """

    kind: type
    keys: tuple[str, ...]
    read: Callable[[ConfigReader], Any]
    write: Callable[[Any], dict[str, Any]]
    rules: Callable[[Any], list[Rule]]
    marks: str

    @property
    def needed(self) -> tuple[str, ...]:
        """All keys, including those that say which layers have the mixer."""
        return (*self.keys, *((RECURRENT, INTERVAL) if self.marks == "layers" else ()))

    def layers(self, keys: ConfigReader, layers: int) -> dict[str, Any]:
        """Returns the mixers of all layers, and the kv heads of those with attention. Raises ConfigError for lists of
        another length, and for several numbers of kv heads."""
        mixer, heads = self.read(keys), set[int]()
        if self.marks == "beside":
            return {"mixers": Softmax(beside=mixer)}
        if self.marks == "heads":
            each = each_layer(keys, KV_HEADS, layers)
            recurrent, heads = [not n for n in each], {n for n in each if n}
        elif self.marks == "layers" and keys.get(RECURRENT) is not None:
            recurrent = [bool(n) for n in each_layer(keys, RECURRENT, layers)]
        else:
            every = keys.whole(INTERVAL, 4) if self.marks == "layers" else layers + 1
            recurrent = [(i + 1) % every != 0 for i in range(layers)]
        if len(heads) > 1:
            raise keys.wrong(KV_HEADS, "one number, or 0, for each layer", sorted(heads))
        mixers = tuple(mixer if recurs else Softmax() for recurs in recurrent)
        return {"mixers": mixers, **({"kv_heads": heads.pop()} if heads else {})}

    def keys_of(self, spec: ModelSpec) -> dict[str, Any]:
        """Returns the keys of a spec. Raises Inexpressible for other mixers, and for a spec without this kind."""
        beside = self.marks == "beside"
        mixers = [getattr(mixer, "beside", None) for mixer in spec.mixers] if beside else spec.mixers
        other_mixers = {mixer for mixer in mixers if mixer != Softmax()}
        if len(other_mixers) != 1 or not all(isinstance(mixer, self.kind) for mixer in other_mixers):
            raise Inexpressible("mixers")
        recurrent = [mixer != Softmax() for mixer in spec.mixers]
        keys = self.write(other_mixers.pop())
        if self.marks == "heads":
            keys[KV_HEADS] = [0 if recurs else spec.kv_heads for recurs in recurrent]
        if self.marks == "layers":
            first = (*recurrent, False).index(False) + 1
            regular = recurrent == [(i + 1) % first != 0 for i in range(spec.layers)]
            keys |= {RECURRENT: recurrent, INTERVAL: first if regular else None}
        return keys


def each_layer(keys: ConfigReader, key: str, layers: int) -> list[int]:
    """Returns a whole number for each layer; the key's value may be one number for all."""
    value = keys.need(key)
    each = [value] * layers if isinstance(value, int) else list(value)
    if len(each) != layers or not all(isinstance(n, int) and n >= 0 for n in each):
        raise keys.wrong(key, f"a whole number for each of {layers} layers", each)
    return each


def with_mixers(names: TensorNames, mixing: Mixing) -> TensorNames:
    """Returns `names` with attention's tensors only in layers with attention, and the mixer's in the others."""

    def rules(spec: ModelSpec) -> list[Rule]:
        each = names.rules(spec)
        attention = [rule for rule in each if rule.ours[0].startswith(MIXER)]
        if spec.gate is not None:
            query = gated_rules(spec)[0]
            attention = [
                replace(query, theirs=r.theirs) if r.ours[0] == query.ours[0] else r for r in attention
            ]

        def softmax(mixer: Softmax) -> list[Rule]:
            rules = [] if mixer.beside is None else mixing.rules(mixer.beside)
            places = [tuple(name.replace(MIXER, f"{MIXER}beside.") for name in rule.ours) for rule in rules]
            return [*attention, *(replace(r, ours=ours) for r, ours in zip(rules, places, strict=True))]

        return [
            *(rule for rule in each if not rule.ours[0].startswith(MIXER)),
            *by_mixer(spec, {Softmax: softmax, mixing.kind: mixing.rules}),
        ]

    return replace(names, rules=rules)


def _named(names: Mapping[str, str], changed: Mapping[str, Change]) -> list[Rule]:
    return [
        Rule((MIXER + ours,), f"blk.#.{theirs}", changes=(changed[ours],) if ours in changed else ())
        for ours, theirs in names.items()
    ]


def _sizes(keys: ConfigReader) -> dict[str, Any]:
    conv, inner, state, heads, groups = map(keys.whole, SSM)
    if inner % heads:
        raise keys.wrong(SSM[1], f"a multiple of the {heads} of {SSM[3]}", inner)
    dims = {"head_dim": state, "value_dim": inner // heads, "conv": conv}
    return {"heads": heads, "key_heads": groups, **dims}


def _size_keys(sizes: RuleSizes) -> dict[str, Any]:
    numbers = (sizes.conv, sizes.channels[2], sizes.head_dim, sizes.heads, sizes.key_heads)
    return dict(zip(SSM, numbers, strict=True))


def _read_beside(keys: ConfigReader) -> SSDSpec:
    """Returns the SSD mixer in parallel with attention, which has a norm if the file has its tensor."""
    return SSDSpec(**_sizes(keys), norm=bool(keys.config.get(NORM)))


STATE = {
    "conv": "ssm_conv1d.weight",
    "conv_bias": "ssm_conv1d.bias",
    "step_bias": "ssm_dt.bias",
    "log_rate": "ssm_a",
    "skip": "ssm_d",
    "norm.weight": "ssm_norm.weight",
    "o_proj.weight": "ssm_out.weight",
}


def _ssd_rules(ssd: SSDSpec) -> list[Rule]:
    parts = tuple(f"{MIXER}{part}_proj.weight" for part in ("gate", "mixed", "step"))
    by_group = Change(lambda x: x.unflatten(0, (ssd.key_heads, -1)), lambda x: x.flatten())
    changed = {"log_rate": lifted(1), "skip": lifted(1), "norm.weight": by_group}
    names = {ours: theirs for ours, theirs in STATE.items() if ssd.norm or ours != "norm.weight"}
    return [
        Rule(parts, "blk.#.ssm_in.weight", (ssd.channels[2], sum(ssd.channels), ssd.heads)),
        *_named(names, changed),
    ]


def _order(keys: int, each: int, axis: int) -> Change:
    """Returns the change that reorders `keys` groups of `each` heads along an axis to the first head of every group,
    then the second of every group, ...: 2 groups of 3, a0 a1 a2 b0 b1 b2, become a0 b0 a1 b1 a2 b2."""

    def turn(x: Tensor, outer: int, inner: int) -> Tensor:
        parts: Tensor = x.unflatten(axis, (outer, inner, -1))
        return parts.transpose(axis, axis + 1).flatten(axis, axis + 2)

    return Change(lambda x: turn(x, keys, each), lambda x: turn(x, each, keys), rows=axis == 0)


DELTA = {
    "gate_proj.weight": "attn_gate.weight",
    "o_proj.weight": "ssm_out.weight",
    "norm.weight": "ssm_norm.weight",
    "log_rate": "ssm_a",
    "decay_bias": "ssm_dt.bias",
}
ALONE = {"beta_proj.weight": "ssm_beta.weight", "decay_proj.weight": "ssm_alpha.weight"}


def _delta_rules(delta: DeltaSpec, ordered: bool) -> list[Rule]:
    """Returns the rules of a delta layer: Qwen3.5's if value heads are `ordered`, else Qwen3-Next's, where betas and
    decays of a key head are in one matrix."""
    values_per_key = delta.heads // delta.key_heads
    by_row, by_column = (_order(delta.key_heads, values_per_key, axis) for axis in (0, 1))
    turned = {**DELTA, **ALONE}.keys() - {"norm.weight"} if ordered and values_per_key > 1 else set()
    changed = {ours: by_column if ours == "o_proj.weight" else by_row for ours in turned}
    fused = [
        Rule(
            tuple(f"{MIXER}{letter}_{ours}" for letter in "qkv"),
            f"blk.#.{theirs}",
            delta.channels,
            changes=(None, None, by_row) if turned else (),
        )
        for ours, theirs in (("proj.weight", "attn_qkv.weight"), ("conv", "ssm_conv1d.weight"))
    ]
    beta_and_decay = tuple(MIXER + ours for ours in ALONE)
    together = Rule(beta_and_decay, "blk.#.ssm_ba.weight", (delta.heads,) * 2, delta.key_heads)
    return [*fused, *_named(DELTA, changed), *(_named(ALONE, changed) if ordered else [together])]


SHORT = {
    "in_proj.weight": "shortconv.in_proj.weight",
    "conv": "shortconv.conv.weight",
    "o_proj.weight": "shortconv.out_proj.weight",
}
CONV = Mixing(
    ShortConv,
    (LENGTH,),
    lambda keys: ShortConv(conv=keys.whole(LENGTH)),
    lambda short: {LENGTH: short.conv},
    lambda short: _named(SHORT, {}),
    "heads",
)
SSD = Mixing(SSDSpec, SSM, lambda keys: SSDSpec(**_sizes(keys)), _size_keys, _ssd_rules, "heads")
SSD_ALONE = SSD._replace(marks="all")
SSD_BESIDE = SSD._replace(read=_read_beside, marks="beside")
DELTA_NEXT, DELTA_3_5 = (
    Mixing(
        DeltaSpec,
        SSM,
        lambda keys: DeltaSpec(**_sizes(keys)),
        _size_keys,
        partial(_delta_rules, ordered=ordered),
        "layers",
    )
    for ordered in (False, True)
)
