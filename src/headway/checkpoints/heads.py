"""Converts a checkpoint to another rotary pairing, or to more kv heads, exactly: the model stays the same function.

Legend: H query heads, K kv heads, D per head, M width.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from headway.errors import CheckpointError
from headway.models import ModelSpec
from headway.models.mixers import differ, kind_of
from headway.positions import Pairing, PerLayer, PositionScheme, Rotary, in_pairing, rotations, to_pairing
from headway.storage.lazy import Form, changed

_MODULES = ("q_proj", "k_proj", "q_global_proj", "k_global_proj", "q_norm", "k_norm")
"""Modules that produce queries and keys. The gain of a norm is that of one head, shared by all, or of all heads."""
# leaves whose first axis is the module's output: weights, biases, gains, B and the magnitudes of adapters
_OUTPUT = ("weight", "bias", "lora_B.weight", "lora_magnitude_vector")
_INPUT = "lora_A.weight"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NAME = re.compile(rf"(?:^|\.)({'|'.join(_MODULES)})\.(.+)$")
_MIXER = re.compile(r"(?!encoder\.)(?:.*\.)?layers\.(\d+)\.self_attn\.")
_KEYS_VALUES = re.compile(r"(?:^|\.)(?:(?:k_proj|v_proj)\.(?:weight|bias)|k_norm\.weight)$")


def attends(spec: ModelSpec, name: str) -> bool:
    """Returns whether the tensor `name` does not belong to a token mixer without positions, such as the delta rule."""
    match = _MIXER.match(name)
    return match is None or kind_of(spec.mixers[int(match[1])]).positions


def counts_heads(spec: ModelSpec, name: str) -> bool:
    """Returns whether the heads of a key or value tensor `name` are counted by `spec.kv_heads`: those of the encoder
    beside a decoder are not, since it has a spec of its own."""
    return attends(spec, name) and not (spec.encoder is not None and name.startswith("encoder."))


def change_pairing(
    state: Mapping[str, Tensor], spec: ModelSpec, to: Pairing
) -> tuple[Mapping[str, Tensor], ModelSpec]:
    """Returns the same function in another rotary pairing, as (state, spec); unchanged tensors are not copied, and lazy
    ones stay lazy.

    Permutes the rows of query and key weights [H*D, M] and [K*D, M], their biases, per-head norm gains [D] and the
    output side of adapters, each with the head count of that tensor; with partial rotary embedding only the rotated
    dimensions of each head. Exact: there and back gives identical bits. Raises CheckpointError for an unknown part of a
    query or key projection, rather than leave it in the old pairing, and if there is no rotary pairing or values are
    computed from keys (tied_values).
    """
    if not rotations(spec.positions):
        raise CheckpointError(
            f"the rotary pairing cannot be changed: positions are {type(spec.positions).__name__}, not rotary"
        )
    new = replace(spec, positions=in_pairing(spec.positions, to))
    if new == spec:
        return state, new
    if any(getattr(mixer, "tied_values", False) for mixer in spec.mixers):
        raise CheckpointError(
            "the rotary pairing cannot be changed in a model with tied_values, whose values are computed from keys; "
            "keep the pairing"
        )
    turned: dict[str, tuple[PositionScheme, PositionScheme]] = {}
    for name in state:
        match = _NAME.search(name) if attends(spec, name) else None
        if match is None:
            continue
        schemes = _of_layer(spec, name), _of_layer(new, name)
        if match[2] in _OUTPUT:
            turned[name] = schemes
        elif match[2] != _INPUT:
            raise CheckpointError(
                f"the rotary pairing cannot be changed: {name} is an unknown part of a query or key "
                "projection"
            )

    def change(name: str, tensor: Tensor) -> Tensor:
        rotary, target = turned.get(name, (None, None))
        if not isinstance(rotary, Rotary) or not isinstance(target, Rotary):
            return tensor
        layer = _LAYER.search(name)
        head_dim = spec.head_dim if layer is None else spec.key_sizes[int(layer[1])][1]
        return to_pairing(
            tensor,
            heads=len(tensor) // head_dim,
            head_dim=head_dim,
            frm=rotary.pairing,
            to=target.pairing,
            dims=rotary.rotated_dims(head_dim),
        )

    return changed(state, change), new


def _of_layer(spec: ModelSpec, name: str) -> PositionScheme:
    """Returns the position scheme of the layer that a tensor belongs to."""
    if not isinstance(spec.positions, PerLayer):
        return spec.positions
    match = _LAYER.search(name)
    if match is None:
        raise CheckpointError(f"cannot change the pairing of {name}: its name has no layer number")
    return spec.positions.at(int(match[1]))


def pairing_name(spec: ModelSpec) -> str:
    """Returns the name of a spec's rotary pairing in files and reports; "none" if there is none."""
    return ", ".join(dict.fromkeys(str(rotary.pairing) for rotary in rotations(spec.positions))) or "none"


def in_pairing_of(spec: ModelSpec, state: Mapping[str, Tensor], frm: ModelSpec) -> Mapping[str, Tensor]:
    """Returns weights `state` (all or some) of a model of spec `frm` in the rotary pairing of `spec`, if it has one."""
    rotaries = rotations(spec.positions)
    if not rotaries or not rotations(frm.positions):
        return state
    return change_pairing(state, frm, rotaries[0].pairing)[0]


def check_uniform(spec: ModelSpec, what: str) -> None:
    """Raises CheckpointError if layers differ in their kv heads, or share those of other layers."""
    if differ(spec.mixers):
        raise CheckpointError(
            f"{what}: the number of kv heads must be equal in all layers, but layers of this model differ"
        )


def repeat_kv_heads(
    state: Mapping[str, Tensor], spec: ModelSpec, kv_heads: int
) -> tuple[Mapping[str, Tensor], ModelSpec]:
    """Returns the same function with `kv_heads` key and value heads, as (state, spec): each of the K heads is repeated
    kv_heads / K times.

    Query head h reads kv head floor(h K / H); repetition puts a copy of that head at floor(h kv_heads / H). With
    kv_heads = H, GQA or MQA becomes MHA. Rows of key and value weights [K*D, M], biases [K*D] and gains of a norm over
    all keys [K*D] are repeated, lazily if the state is lazy. Raises CheckpointError unless `kv_heads` is a multiple of
    K that divides H: any other number would change the function.
    """
    if kv_heads < 1 or kv_heads % spec.kv_heads or spec.heads % kv_heads:
        possible = [n for n in range(spec.kv_heads, spec.heads + 1, spec.kv_heads) if spec.heads % n == 0]
        raise CheckpointError(
            f"{spec.kv_heads} kv heads cannot be repeated to kv_heads={kv_heads} under {spec.heads} query heads; "
            f"possible are {', '.join(map(str, possible))}"
        )
    check_uniform(spec, "repeat_kv_heads")
    times = kv_heads // spec.kv_heads

    def has_heads(name: str) -> bool:
        matches = _KEYS_VALUES.search(name) is not None and counts_heads(spec, name)
        return matches and ("k_norm" not in name or spec.qk_norm == "all")

    def repeated(name: str, value: Tensor) -> Tensor:
        if not has_heads(name) or times == 1:
            return value
        heads = value.reshape(spec.kv_heads, spec.head_dim, *value.shape[1:])
        return heads.repeat_interleave(times, 0).flatten(0, 1)

    def form(name: str, stored: Form) -> Form:
        if not has_heads(name):
            return stored
        return Form((stored.shape[0] * times, *stored.shape[1:]), stored.dtype)

    return changed(state, repeated, form), replace(spec, kv_heads=kv_heads)
