"""What a model will cost on a machine, as values: the machine, each kind of layer, and the whole.

Legend: n tokens of a row, B rows.
"""

from dataclasses import dataclass

import torch

from headway import hardware, processor
from headway.choice import Choice


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The roofs of a machine: bytes that can be allocated, bytes/s that are read, FLOP/s of a matrix product; and
    whether kernels are those of a "cpu" or of "cuda"."""

    name: str
    memory: int
    bandwidth: float
    peak: float
    native: bool = True
    device: str = "cpu"

    @staticmethod
    def here(dtype: torch.dtype) -> "Machine":
        """This machine, measured (a second or two)."""
        return Machine(
            name=processor.cpu_name(),
            memory=hardware.memory_available(),
            bandwidth=hardware.read_bandwidth(),
            peak=hardware.gemm_peak(dtype),
            native=dtype != torch.bfloat16 or hardware.multiplies(dtype),
        )


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Layers that share a pattern: what each of them gets, and what all of them together cost.

    Attributes:
        pattern: as text. layers: their numbers.
        slots: slots per row in the cache of one layer. reads: keys that one more token sees in one head.
        kv_stored, kv_read: bytes in all these layers and rows, held, and read for one more token of each row.
        prefill, cache, decode: which backend for whole rows, which cache, and which backend for one more token; and
            why.
    None where there is no such thing: there are no caches in an encoder, and no backends of linear attention.
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
        notes: what the numbers do not say.
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
