"""Questions in words, in English and Chinese: an index of what is asked about attention, and the topics that answer.

The index is data, `en.toml` and `zh.toml`: by topic an answer, the command that shows it, and how it is asked. `find`
compares a question with these by the terms that they share; nothing is learned, and every score can be taken apart
(`Match.terms`).
"""

from headway_lab.questions.index import LANGUAGES, Entry, Index, Match, entries, language_of

__all__ = ["LANGUAGES", "Entry", "Index", "Match", "entries", "language_of"]
