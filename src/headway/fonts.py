"""The fonts of pictures, by language. matplotlib is imported where it is asked."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from headway.errors import ConfigError

CHINESE = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei",
           "PingFang SC", "Heiti SC", "Microsoft YaHei", "SimHei")  # fmt: skip


@cache
def fonts(language: str) -> tuple[str, ...]:
    """The families that text in a language is set in: matplotlib's own, and for Chinese one that has its characters, of
    the system, or the one that the package zhplot ships (Noto Sans SC, under the Open Font License).

    Raises ConfigError where there is none."""
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
        "pictures in Chinese need a font that has its characters, and none is installed; `pip install zhplot` brings "
        "one, and so does the system's package fonts-noto-cjk"
    )
