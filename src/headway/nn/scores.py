"""The score steps of a layer, or of all layers, as a module."""

from collections.abc import Sequence

from torch import Tensor, nn

from headway.scores import Score


class Scores(nn.Module):
    """Score steps whose tensors are part of the module: trained when they are an `nn.Parameter`, moved and saved
    with it in any case. Tensor j of step i is named `i_j`."""

    def __init__(self, steps: Sequence[Score] = ()) -> None:
        super().__init__()
        self.steps = tuple(steps)
        for name, tensor in self._tensors().items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self) -> tuple[Score, ...]:
        """The steps on the tensors that are registered here, wherever the module has been moved to."""
        return tuple(
            step.with_parameters(tuple(getattr(self, f"{i}_{j}") for j in range(len(step.parameters))))
            for i, step in enumerate(self.steps)
        )

    def _tensors(self) -> dict[str, Tensor]:
        return {f"{i}_{j}": t for i, step in enumerate(self.steps) for j, t in enumerate(step.parameters)}

    def extra_repr(self) -> str:
        return ", ".join(type(step).__name__ for step in self.steps)
