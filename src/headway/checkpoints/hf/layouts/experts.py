"""Shared by layouts of mixtures of experts: keys of `Experts`, which layers have them, names of their tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible, checked_sizes
from headway.checkpoints.hf.layouts.base import Part
from headway.checkpoints.hf.layouts.rules import Modules, Rule
from headway.models import ModelSpec
from headway.nn import Experts

LAYER = "model.layers.#."
AUX = "router_aux_loss_coef"
NORMALIZED = {"normalized": "norm_topk_prob"}


class Sparse(NamedTuple):
    """The keys that say which layers have experts.

    Attributes:
        keys: key -> transformers' default if it is absent.
        read: returns whether each layer has experts, from the config and the number of layers.
        write: returns the keys, from the same list.
    """

    keys: Mapping[str, Any]
    read: Callable[[ConfigReader, int], Sequence[bool]]
    write: Callable[[Sequence[bool]], dict[str, Any]]


def _read_steps(config: ConfigReader, layers: int) -> list[bool]:
    dense, every = config.get("mlp_only_layers") or [], config.whole("decoder_sparse_step")
    if not isinstance(dense, list):
        raise config.wrong("mlp_only_layers", "a list of numbers of layers", dense)
    return [i not in dense and (i + 1) % every == 0 for i in range(layers)]


def _dense(sparse: Sequence[bool]) -> list[int]:
    return [i for i, has in enumerate(sparse) if not has]


EVERY = Sparse({}, lambda config, layers: [True] * layers, lambda sparse: {})
STEPS = Sparse(
    {"mlp_only_layers": None, "decoder_sparse_step": 1},
    _read_steps,
    lambda sparse: {"mlp_only_layers": _dense(sparse), "decoder_sparse_step": 1},
)


def behind_first(usual: int, key: str = "first_k_dense_replace") -> Sparse:
    """Returns the keys of experts in all layers but the first few, whose number is `key`, by default `usual`."""
    return Sparse(
        {key: usual},
        lambda config, layers: [i >= config.whole(key, usual, least=0) for i in range(layers)],
        lambda sparse: {key: len(_dense(sparse))},
    )


@dataclass(frozen=True, kw_only=True)
class ExpertKeys:
    """The config keys of `Experts`, and the fields that a family has without a key.

    Attributes:
        count: names of the key of the number of experts; any of them is read, the first is written.
        top: key of the number of experts chosen for a token.
        hidden: key of an expert's width.
        dense: key of the width of layers without experts.
        shared: key of the width of the shared expert, or of that width divided by an expert's (`shared_by_count`); ""
            if there is none.
        others: other fields -> their keys.
        always: fields with one value in all models of a family.
        sparse: which layers have experts.
        aux: transformers' default of the coefficient of the load-balancing loss; None in families without that loss.
        usual: transformers' defaults of absent keys.
        optional: whether models may have no experts, or no shared one, and then none of their keys.
    """

    count: Sequence[str] = ("num_experts", "num_local_experts")
    top: str = "num_experts_per_tok"
    hidden: str = "moe_intermediate_size"
    dense: str = "intermediate_size"
    shared: str = ""
    shared_by_count: bool = False
    others: Mapping[str, str] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    sparse: Sparse = EVERY
    aux: float | None = None
    usual: Mapping[str, Any] = field(default_factory=dict)
    optional: bool = False

    @property
    def keyed(self) -> Mapping[str, str]:
        """`others`, and the key of the loss coefficient if there is one."""
        return self.others if self.aux is None else {**self.others, "aux_loss_coef": AUX}

    def read(self, config: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields `experts` and `hidden`; the default of an expert's width is that of dense layers. Raises
        ConfigError for two counts that differ, and as `Experts` does."""
        if self.optional and not config.get(self.count[0]):
            return {}
        counts = {name: config.whole(name) for name in self.count if config.get(name) is not None}
        if len({*counts.values()}) > 1:
            raise config.wrong(self.count[0], f"equal to {self.count[1]}", counts)
        count = next(iter(counts.values()), 0) or config.whole(self.count[0])
        hidden = config.whole(self.hidden, fields.get("hidden"))
        shared = config.whole(self.shared, 0, least=0) if self.shared else 0
        shared *= hidden if self.shared_by_count else 1
        sparse = self.sparse.read(config, fields["layers"])
        checked_sizes({f"{self.shared}, in hidden units,": shared})
        typed: Mapping[type, Callable[[str], Any]] = {
            bool: config.flag,
            int: config.whole,
            float: config.number,
        }
        experts = Experts(
            count=count,
            top=config.whole(self.top),
            hidden=hidden,
            shared=shared,
            **{name: typed[type(getattr(Experts, name))](key) for name, key in self.keyed.items()},
            **{**self.always, **({"shared_gate": False} if self.optional and not shared else {})},
        )
        return {
            "experts": [experts if has else None for has in sparse],
            "hidden": hidden if all(sparse) else config.whole(self.dense),
        }

    @property
    def part(self) -> Part:
        """The part of a layout that reads and writes all these keys."""
        needed = {*self.count, self.top, self.hidden, self.dense, self.shared, *self.keyed.values()} - {""}
        usual = {**self.sparse.keys, **self.usual, **({} if self.aux is None else {AUX: self.aux})}
        return Part({**dict.fromkeys(needed), **usual}, self.read, self.write)

    @property
    def harmless(self) -> tuple[str, ...]:
        """Keys of the load-balancing loss that do not affect a model: whether transformers adds it, and its coefficient
        if the family has none."""
        return ("output_router_logits", *((AUX,) if self.aux is None else ()))

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Returns the keys; the caller finds what they cannot express by reading them again. Raises Inexpressible for a
        model without experts, or with several kinds of them."""
        kinds = {experts for experts in spec.experts if experts is not None}
        if self.optional and not kinds:
            return {}
        if len(kinds) != 1:
            raise Inexpressible("experts")
        (experts,) = kinds
        shared = experts.shared // experts.hidden if self.shared_by_count else experts.shared
        return {
            self.count[0]: experts.count,
            self.top: experts.top,
            self.dense: spec.hidden,
            self.hidden: experts.hidden,
            **({self.shared: shared} if self.shared and (shared or not self.optional) else {}),
            **{key: getattr(experts, name) for name, key in self.keyed.items()},
            **self.sparse.write([layer is not None for layer in spec.experts]),
        }


def expert_names(count: int, *parts: str, leaf: str = "weight", layer: str = LAYER) -> tuple[str, ...]:
    """Returns our names of the matrices `parts` of a layer's `count` experts: all of expert 0, all of expert 1, ..."""
    return tuple(f"{layer}mlp.experts.{e}.{part}_proj.{leaf}" for e in range(count) for part in parts)


def stacked(
    spec: ModelSpec,
    gate_up: str = "mlp.experts.gate_up_proj",
    down: str = "mlp.experts.down_proj",
    *,
    leaves: Modules = MappingProxyType({"weight": ""}),
    turned: bool = False,
) -> list[Rule]:
    """Returns rules for all experts of a layer in two tensors: `gate_up` [E, 2 F, M], the rows of the gate first, and
    `down` [E, M, F].

    `leaves` are the suffixes of their names for a "weight" and a "bias". If they are `turned`, the last two axes are
    swapped, and columns of gate and up are interleaved: g0 u0 g1 u1 ..."""
    experts = next(experts for experts in spec.experts if experts is not None)
    units, count = experts.hidden, experts.count
    groups = units if turned else 1
    rules = []
    for leaf, end in leaves.items():
        ours = expert_names(count, "gate", "up", leaf=leaf)
        rules.append(Rule(ours, f"{LAYER}{gate_up}{end}", (units, units), groups, turned, stacked=count))
        ours = expert_names(count, "down", leaf=leaf)
        rules.append(Rule(ours, f"{LAYER}{down}{end}", transposed=turned, stacked=count))
    return rules
