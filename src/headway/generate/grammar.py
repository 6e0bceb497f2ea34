"""What a text may say: grammars, which allow or refuse its tokens one by one.

Legend: V vocab.
"""

from typing import Protocol

from torch import Tensor


class Grammar(Protocol):
    """Where a text stands in a grammar: a function of its new tokens, and at first the grammar itself."""

    @property
    def ended(self) -> bool:
        """Whether nothing more can follow, an EOS apart."""

    def allowed(self) -> Tensor:
        """The tokens that may come next: bool [V], on the CPU. An EOS is one of them where the text may end; none
        are where the grammar has become too large to tell."""

    def advance(self, token: int) -> None:
        """One token more, which was allowed."""

    def copy(self) -> "Grammar":
        """The same place, for another text."""
