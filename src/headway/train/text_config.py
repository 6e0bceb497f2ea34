"""Settings of training on text, next tokens or masked ones. Imports no torch."""

from __future__ import annotations

from headway.train.config import setting
from headway.train.rows_config import PackedConfig


class TextConfig(PackedConfig):
    """Settings of a run on text. Of the tasks, the one that the model is for unless it is given.

    task: what is trained: causal-lm (the next token), masked-lm (hidden tokens), translation, chat,
        preference, classify, tag, answer, embed, or MODULE:CLASS of your own; `--task NAME --help` lists the
        settings of a task [default: what the model is for]
    data: training text: a text file, records with a "text" each (.jsonl, .json, .csv, .tsv), a folder of .txt
        and .jsonl files, a token file (.tokens) made by headway.data, or hf://OWNER/NAME/PATH or
        hf://OWNER/NAME:SPLIT#COLUMN of the Hub
    cached_tokens: resume with the tokens that the run has encoded, though its `data` or `validation` has
        changed since, or is gone; else that is refused
    mask_share: share of the tokens that masked-lm hides [default: 0.15]
    whole_words: masked-lm hides whole words, where the tokenizer tells them [default: no]
    pack: masked-lm puts several short texts in a row, which do not see each other; no: one text a row
        [default: yes]
    eval_tokens: evaluations between steps use the first N held-out tokens [default: all]; the first and the
        last use all
    eval_contexts: lengths of rows that held-out text is measured in as well, after the last step (and by
        eval_at_start)
    sample_prompts: texts that are continued, or whose mask tokens are filled in, every `sample_every` steps
        and at the end
    sample_every: continue or fill in the prompts every N steps [default: only at the end]
    sample_tokens: length of a continuation
    """

    cached_tokens: bool = setting(False, group="Data", on_resume="same bits")
    mask_share: float | None = setting(None, group="Task", gt=0.0, lt=1.0)
    whole_words: bool | None = setting(None, group="Task")
    pack: bool | None = setting(None, group="Task")
    eval_tokens: int | None = setting(None, group="Output", unit="tokens", ge=1)
    eval_contexts: tuple[int, ...] = setting((), group="Output", unit="tokens")
    sample_prompts: tuple[str, ...] = setting((), group="Output")
    sample_every: int | None = setting(None, group="Output", unit="steps", ge=1)
    sample_tokens: int = setting(64, group="Output", unit="tokens", ge=1)

    @property
    def paths(self) -> dict[str, str]:
        """See `TrainConfig`."""
        cached = ("data", "validation") if self.cached_tokens else ()
        return {name: value for name, value in super().paths.items() if name not in cached}

    def contradictions(self) -> dict[str, bool]:
        """See `TrainConfig`."""
        return {
            **super().contradictions(),
            "sample_every is given without sample_prompts: there is nothing to continue": (
                self.sample_every is not None and not self.sample_prompts
            ),
        }
