"""Backend `native`: any pattern of primitives on a CPU, with this package's C++ kernels."""

from headway.attention.backends.base import Backend, Status
from headway.attention.backends.native import kernels, torch_op
from headway.errors import BackendError
from headway.native import loader


def status() -> Status:
    """Returns the level and the file of the loaded library, or why there is none and what that costs."""
    try:
        result = loader.search()
    except BackendError as error:
        result = loader.Found(None, str(error), str(error))
    if result.library is None:
        return Status(
            False, f"sdpa and banded take over, which reach a fifth of a CPU's bf16 peak: {result.why}"
        )
    return Status(True, f"{NATIVE.about}, level {result.library.level}, in {result.library.path}")


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
