"""The cost of a model on a machine, as values: each group of layers, and the whole model, with notes.

Legend: n tokens of a row, B rows.
"""

from dataclasses import dataclass

from headway.choice import Choice
from headway.models.cost.devices import Machine
from headway.models.cost.operations import receptive_field
from headway.models.cost.weights import Quantized
from headway.models.mixers import kind_of, states_of
from headway.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Layers that share pattern and mixer: what is chosen for each of them, and what all of them cost together.

    Attributes:
        pattern: the pattern as text, or the mixer's name. layers: layer numbers.
        slots: cache slots per row of one layer. reads: keys that one more token attends to, averaged over the kv
            heads.
        kv_stored, kv_read: bytes over all these layers and rows: stored, and read for one more token of each row.
        prefill, cache, decode: the chosen backend for whole rows, the chosen cache, and the chosen backend for one
            more token, each with its reason.
    None if not applicable: an encoder has no caches, and linear attention has no backends.
    """

    pattern: str
    layers: tuple[int, ...]
    slots: int | None = None
    reads: int | None = None
    kv_stored: int = 0
    kv_read: int = 0
    cache: Choice | None = None
    prefill: Choice | None = None
    decode: Choice | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The plan of one model at one context length and batch size on one machine, in bytes, FLOPs and seconds.

    Attributes:
        kind: "decoder", "encoder" or "encoder-decoder".
        context: tokens per row; of the target for an encoder-decoder, with source: tokens per source row.
        dtype: dtype of weights and products. kv_dtype: dtype of the KV cache.
        parameters: parameter counts by place; their sum is what a model card states. active: parameters that one token
            uses, with its chosen experts only. weight_bytes: bytes of the stored weights, by place.
        layers: of the decoder, or of a lone encoder; encoder_layers: of the encoder beside a decoder.
        weights: bytes of all weights. kv: bytes of the KV cache over all layers and rows, cross-attention keys
            included.
        working: peak bytes of the first forward pass over all tokens, besides weights and KV cache. needed: the sum of
            the three; fits: needed <= machine.memory. decoding: bytes held while decoding one more token of every row
            after the prompt; None for an encoder.
        training: peak bytes of training on rows of this shape, by cause; checkpointed: their sum with checkpointed
            blocks; scores_stored: their sum if all score matrices are stored. trained: bytes of all gradients and Adam
            moments; adapted: the same for a LoRA adapter of rank 16 on every linear layer of the blocks.
        moved: bytes read for one more token of every row. step_flops: operations for it.
        step_seconds: the larger of moved / bandwidth and step_flops / peak; bound: "memory" or "compute", whichever is
            larger. tokens_per_second: over all rows. From moved on, all are None for an encoder.
        prefill_flops: operations of the first pass: over the rows, or over the source and the first target token;
            prefill_seconds: prefill_flops / peak.
        notes: sentences on facts that the numbers do not show.
    """

    model: str
    family: str
    kind: str
    context: int
    source: int | None
    batch: int
    dtype: str
    kv_dtype: str
    machine: Machine
    parameters: dict[str, int]
    active: int
    weight_bytes: dict[str, int]
    layers: tuple[LayerPlan, ...]
    encoder_layers: tuple[LayerPlan, ...]
    weights: int
    kv: int
    working: int
    needed: int
    decoding: int | None
    fits: bool
    training: dict[str, int]
    checkpointed: int
    scores_stored: int
    trained: int
    adapted: int
    moved: int | None
    step_flops: float | None
    step_seconds: float | None
    bound: str | None
    tokens_per_second: float | None
    prefill_flops: float
    prefill_seconds: float
    notes: tuple[str, ...]

    @property
    def parameter_count(self) -> int:
        """The total number of trained parameters."""
        return sum(self.parameters.values())


def plan_notes(
    spec: ModelSpec, context: int, machine: Machine, quantized: Quantized | None
) -> tuple[str, ...]:
    """Returns the sentences at the end of a plan."""
    notes = []
    if context > spec.trained_context:
        notes.append(
            f"a context of {context} exceeds the {spec.trained_context} tokens that the model was trained on: it "
            "runs, but nothing vouches for what it says there"
        )
    field = receptive_field(spec)
    if field is not None and field < context:
        who = "a token" if spec.kind == "encoder" else "the last token"
        notes.append(
            f"all layers are windows: {who} cannot depend on more than {field} of the {context} tokens"
        )
    for mixer in states_of(spec.mixers):
        notes.append(f"{kind_of(mixer).name} ({mixer}): a state of one size at any length")
    if not machine.native:
        notes.append("this CPU has no bfloat16 products: they save memory and cost time; see --dtype float32")
    measured = machine.device == "cpu"
    roofs = "the measured bandwidth and matrix product of this machine" if measured else "of a data sheet"
    notes.append(f"speeds are roofs ({roofs}); real runs stay below")
    if quantized is not None:
        notes.append(f"weights are {quantized}; training is without that")
    return tuple(notes)
