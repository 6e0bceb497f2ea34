"""What a run of tokens does to a state.

Legend: B rows, H value heads, D per key, E per value.
"""

from dataclasses import dataclass

from torch import Tensor

from headway.errors import PatternError


@dataclass(frozen=True, eq=False)
class DeltaTransition:
    """What tokens do to the state before them, whatever that is: S -> decay S + update.

        decay    product of (I - beta_t k_t k_t^T) diag(a_t), the last token's first      [B, H, D, D]
        update   the state that they leave where none was before                          [B, H, D, E]

    Runs of tokens compose, exactly and in any grouping (`then`), so that parts of a row can be computed apart. float32,
    or float64 where keys are.
    """

    decay: Tensor
    update: Tensor

    def then(self, later: "DeltaTransition") -> "DeltaTransition":
        """What these tokens and then the `later` ones do. Raises PatternError for transitions of other sizes."""
        if self.update.shape != later.update.shape or self.decay.dtype != later.decay.dtype:
            raise PatternError(
                f"DeltaTransition: updates of [batch, heads, D, E] = {[*self.update.shape]} in {self.update.dtype} and "
                f"{[*later.update.shape]} in {later.update.dtype} do not compose; make both of the same layer and rows"
            )
        return DeltaTransition(later.decay @ self.decay, later.apply(self.update))

    def apply(self, state: Tensor) -> Tensor:
        """The state after these tokens, of the state [B, H, D, E] before them."""
        return self.decay @ state + self.update
