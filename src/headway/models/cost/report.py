"""The cost of a model on a machine, as values: each kind of layer, and the whole, with notes.

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
    """Layers that share a pattern: what each of them gets, and what all of them together cost.

    Attributes:
        pattern: as text. layers: their numbers.
        slots: slots per row in the cache of one layer. reads: keys that one more token sees in one head.
        kv_stored, kv_read: bytes in all these layers and rows, held, and read for one more token of each row.
        prefill, cache, decode: which backend for whole rows, which cache, and which backend for one more token; and
            why.
    None where it does not apply: there are no caches in an encoder, and no backends of linear attention.
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
    """The plan of one model at one context and batch on one machine. Bytes, FLOPs and seconds.

    Attributes:
        kind: "decoder", "encoder" or "encoder-decoder".
        context: tokens of a row; of an encoder-decoder: of the target, and source: of the source.
        dtype: of weights and products. kv_dtype: of what the caches store.
        parameters: by place; their sum is what a model card states. active: those that one token is computed with, of
            experts the chosen ones. weight_bytes: what they take, by place.
        layers: of the decoder, or of an encoder alone; encoder_layers: of the encoder beside a decoder.
        weights: bytes. kv: bytes of keys and values, all layers and rows, those of an encoder's states included.
        working: bytes that the first pass over all tokens needs besides at its peak. needed: the three together; fits:
            needed <= machine.memory. decoding: what one more token of every row holds, with the prompt read before;
            None of an encoder.
        training: bytes that training on rows of this shape holds at its peak, by cause; checkpointed: their sum when
            blocks are computed again; scores_stored: when every score matrix is kept. trained: bytes of all gradients
            and Adam's moments; adapted: those of an adapter of rank 16 on every linear layer of the blocks.
        moved: bytes read for one more token of every row. step_flops: operations for that.
        step_seconds: the larger of moved / bandwidth and step_flops / peak; bound: "memory" or "compute", which of the
            two. tokens_per_second: of all rows together. All of these are None of an encoder.
        prefill_flops: of the first pass: over the rows, or over the source and the first token of the target;
            prefill_seconds: prefill_flops / peak.
        notes: sentences on facts that are not in the numbers.
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
        """All trained numbers."""
        return sum(self.parameters.values())


def plan_notes(
    spec: ModelSpec, context: int, machine: Machine, quantized: Quantized | None
) -> tuple[str, ...]:
    """The sentences of a plan's end."""
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
