"""Multilingual translation models: control tokens name the languages; they are put around the source and begin the
target.

                       source                 target
    mBART              text </s> en_XX        begins with ro_RO, which is its decoder_start_token_id
    mBART-50, NLLB     en_XX text </s>        the first generated token is ro_RO (forced_bos_token_id)
    M2M100             __en__ text </s>       the same, with __ro__

(Liu et al. 2020; Tang et al. 2020; NLLB team 2022; Fan et al. 2020.)
"""

import re
from collections.abc import Mapping
from typing import Any

from headway.errors import DataError, check_known
from headway.text.template import BARE, Part, Template

MBART = """ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP
    nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN""".split()  # noqa: SIM905
MORE = """af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE
    ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI""".split()  # noqa: SIM905
MBART50 = [*MBART, *MORE]
M2M100 = """af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr
    ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or
    pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu""".split()  # noqa: SIM905
WMT21 = "en ha is ja cs ru zh de".split()  # noqa: SIM905
"""Languages in the order of their ids."""
CODE = re.compile(r"__([a-z]{2,3})__|[a-z]{2}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3}")
BEHIND: Mapping[str, bool] = {"mbart": True, "mbart50": False, "m2m100": False, "nllb": False}
"""Whether a source ends with the language, behind </s>, or begins with it, by kind of tokenizer."""
KEYS = ("src_lang", "tgt_lang")
"""The keys for source and target language in tokenizer_config.json."""


def language_ids(controls: Mapping[str, int]) -> dict[str, int]:
    """Returns the languages that control tokens name and their ids, in the order of ids: "en_XX", "eng_Latn", "en" for
    __en__."""
    matches = ((CODE.fullmatch(name), i) for name, i in sorted(controls.items(), key=lambda item: item[1]))
    return {code[1] or code[0]: i for code, i in matches if code is not None}


def source_template(kind: str, languages: Mapping[str, int], eos: int, config: Mapping[str, Any]) -> Template:
    """Returns the template that a kind of tokenizer in `BEHIND` puts around a source in the configured language, or the
    first.

    NLLB's older folders set `legacy_behaviour` if the language ends the source."""
    end, code = (
        Part(eos, None, 0),
        Part(languages.get(str(config.get(KEYS[0])), min(languages.values())), None, 0),
    )
    behind = BEHIND[kind] or config.get("legacy_behaviour") is True
    before, after = ((), (end, code)) if behind else ((code,), (end,))
    return Template((*before, *BARE.single, *after), (*before, *BARE.pair, *after))


def in_language(template: Template, languages: Mapping[str, int], language: str) -> Template:
    """Returns a template with its language tokens replaced by that of `language`."""
    language_tokens, token = {*languages.values()}, languages[language]
    single, pair = (
        tuple(part._replace(token=token) if part.token in language_tokens else part for part in parts)
        for parts in (template.single, template.pair)
    )
    return Template(single, pair)


def check_pair(languages: Mapping[str, int], config: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the source and target languages of a tokenizer's configuration. Raises DataError if one is missing, or
    not among `languages`."""
    names = ", ".join([*languages][:4]) + (", ..." if len(languages) > 4 else "")
    for key, side in zip(KEYS, ("source", "target"), strict=True):
        if config.get(key) is None:
            raise DataError(
                f"this model translates between {len(languages)} languages ({names}), but the {side} language is not "
                f"set: pass {side}_language (--{side}-language), or set {key} in tokenizer_config.json"
            )
        check_known(config[key], languages, f"this tokenizer has no {side} language", error=DataError)
    return str(config[KEYS[0]]), str(config[KEYS[1]])
