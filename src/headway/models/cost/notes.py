"""What the numbers of a plan do not say."""

from headway.models.cost.operations import receptive_field
from headway.models.cost.report import Machine
from headway.models.cost.weights import Quantized
from headway.models.mixers import kind_of, states_of
from headway.models.spec import ModelSpec


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
