"""Backend `native`: any pattern of primitives on a CPU, through our own kernels."""

from headway.attention.backends.base import Backend, Status
from headway.attention.backends.native import kernels, torch_op
from headway.errors import BackendError
from headway.native import loader


def status() -> Status:
    """The level and the file of the library, or why there is none and what that costs."""
    try:
        found = loader.search()
    except BackendError as error:
        found = loader.Found(None, str(error), str(error))
    if found.library is None:
        return Status(
            False, f"sdpa and banded take over, which reach a fifth of a CPU's bf16 peak: {found.why}"
        )
    return Status(True, f"{NATIVE.about}, level {found.library.level}, in {found.library.path}")


NATIVE = Backend(
    name="native",
    about="C++ kernels for the CPU",
    forward=kernels.forward,
    backward=kernels.backward,
    capabilities=kernels.CAPABILITIES,
    limits=kernels.limits,
    repeat=kernels.repeat,
    operator=torch_op.run,
    status=status,
)
