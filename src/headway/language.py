"""The language of what people read: English or Chinese.

A table maps English texts to Chinese ones. What programs read, and the names of commands, settings and metrics, are
always English. Imports only the standard library and headway's errors."""

import os
import re
from collections.abc import Mapping

from headway.errors import ConfigError

LANGUAGES = ("en", "zh")


def check_language(language: str, where: str) -> str:
    """Returns the language if it is one of `LANGUAGES`. Raises ConfigError otherwise."""
    if language not in LANGUAGES:
        raise ConfigError(f"{where} must be one of {', '.join(LANGUAGES)}, got {language!r}")
    return language


def language_of_environment(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the language of the first of LC_ALL, LC_MESSAGES and LANG that is set (POSIX, section 8.2).

    "zh_CN.UTF-8" is "zh"; every language without a table is English."""
    locale = next((x for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (x := environment.get(name))), "")
    return "zh" if re.match(r"zh($|[_.@-])", locale) else "en"


class Translation:
    """Translated texts by their English source. A key with {} is a template whose matched parts are translated too:

    >>> say = Translation({"{} of {} heads": "{1} 个头中的 {0} 个", "none": "零"})
    >>> say("none of 8 heads")
    '8 个头中的 零 个'

    Texts that the table lacks are translated line by line; lines that it lacks are returned unchanged, as is everything
    if the table is empty."""

    def __init__(self, table: Mapping[str, str]) -> None:
        self.table = table
        templates = sorted(
            (key for key in table if "{}" in key), key=len, reverse=True
        )  # the most exact first
        self.templates = {
            key: re.compile("(.+?)".join(map(re.escape, key.split("{}"))), re.DOTALL) for key in templates
        }

    def __call__(self, text: str) -> str:
        """Returns the text in this language."""
        if text in self.table:
            return self.table[text]
        if "\n" in text:
            return "\n".join(map(self, text.split("\n")))
        for key, pattern in self.templates.items():
            if match := pattern.fullmatch(text):
                return self.table[key].format(*map(self, match.groups()))
        return text

    def fill(self, template: str, **values: object) -> str:
        """Translates a template with named fields, {name}, and fills in the values."""
        return self(template).format(**values)
