"""The language of what people read: English, or Chinese. A table has a text in Chinese by its English; where a program
reads, and in names of commands, settings and measures, there is no other than English. Imports no more than the
standard library and our errors."""

import os
import re
from collections.abc import Mapping

from headway.errors import ConfigError

LANGUAGES = ("en", "zh")


def check_language(language: str, where: str) -> str:
    """The language, if it is one of `LANGUAGES`. Raises ConfigError for another."""
    if language not in LANGUAGES:
        raise ConfigError(f"{where}: languages are {', '.join(LANGUAGES)}; got {language!r}")
    return language


def language_of_environment(environment: Mapping[str, str] = os.environ) -> str:
    """The language of LC_ALL, LC_MESSAGES or LANG, the first that is set (POSIX, section 8.2): "zh_CN.UTF-8" is "zh";
    English for every language without a table."""
    locale = next((x for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (x := environment.get(name))), "")
    return "zh" if re.match(r"zh($|[_.@-])", locale) else "en"


class Translation:
    """Texts by their English. A key with {} is of texts that vary there, and what stands there is translated too:

    >>> say = Translation({"{} of {} heads": "{1} 个头中的 {0} 个", "none": "零"})
    >>> say("none of 8 heads")
    '8 个头中的 零 个'

    A text that the table lacks is returned as it is, line by line; so is everything where the table is empty."""

    def __init__(self, table: Mapping[str, str]) -> None:
        self.table = table
        templates = sorted(
            (key for key in table if "{}" in key), key=len, reverse=True
        )  # the most exact first
        self.templates = {
            key: re.compile("(.+?)".join(map(re.escape, key.split("{}"))), re.DOTALL) for key in templates
        }

    def __call__(self, text: str) -> str:
        """The text in this language."""
        if text in self.table:
            return self.table[text]
        if "\n" in text:
            return "\n".join(map(self, text.split("\n")))
        for key, pattern in self.templates.items():
            if match := pattern.fullmatch(text):
                return self.table[key].format(*map(self, match.groups()))
        return text

    def fill(self, template: str, **values: object) -> str:
        """A template of names, {name}, in this language, and the values in their places."""
        return self(template).format(**values)
