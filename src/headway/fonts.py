"""Fonts of plots, by language. matplotlib is imported only when needed."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from headway.errors import ConfigError

CHINESE = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei",
           "PingFang SC", "Heiti SC", "Microsoft YaHei", "SimHei")  # fmt: skip


@cache
def fonts(language: str) -> tuple[str, ...]:
    """Returns the font families for text in a language: matplotlib's default and, for Chinese, one with Chinese
    characters.

    The Chinese family is an installed one, or the one shipped in the package zhplot (Noto Sans SC, under the Open Font
    License). Raises ConfigError if there is none."""
    default = ("DejaVu Sans",)
    if language != "zh":
        return default
    from matplotlib import font_manager

    families = font_manager.fontManager.get_font_names()
    if family := next((name for name in CHINESE if name in families), None):
        return *default, family
    package = find_spec("zhplot")
    if package and package.origin:
        path = Path(package.origin).parent / "fonts" / "NotoSansSC-Regular.ttf"
        font_manager.fontManager.addfont(path)
        return *default, font_manager.get_font(path).family_name
    raise ConfigError(
        "pictures in Chinese need a Chinese font, and none is installed; run `pip install zhplot`, or install the "
        "system package fonts-noto-cjk"
    )
